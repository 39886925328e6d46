"""Placement: which rank stands where under every order of the letters, and which groups leave a node."""

from __future__ import annotations

from itertools import permutations

import pytest

from engine.plan import Degrees, World
from engine.plan.placement import axes_in_order, coordinates, crossings, describe_crossings, describe_places, groups
from tests.building import building
from tests.plan.conftest import MakePlan, messages

ALL = ["".join(letters) for letters in permutations("DPT")]
CUBE = {"DPT": "tp 01 23 45 67 pp 02 13 46 57 dp 04 15 26 37"}
"""World 8, every degree 2: the groups of each axis."""
CUBE |= {"DTP": "tp 02 13 46 57 pp 01 23 45 67 dp 04 15 26 37"}
CUBE |= {"PDT": "tp 01 23 45 67 pp 04 15 26 37 dp 02 13 46 57"}
CUBE |= {"PTD": "tp 02 13 46 57 pp 04 15 26 37 dp 01 23 45 67"}
CUBE |= {"TDP": "tp 04 15 26 37 pp 01 23 45 67 dp 02 13 46 57"}
CUBE |= {"TPD": "tp 04 15 26 37 pp 02 13 46 57 dp 01 23 45 67"}

PLACES = {"DPT": "000 001 010 011 100 101 110 111", "PTD": "000 100 001 101 010 110 011 111"}
"""(dp, pp, tp) of ranks 0 to 7, as SageMaker's documentation prints two of them."""

TWO_NODES = {
    "DPT": ((0, 4), (0, 8), (8, 8)),
    "PDT": ((0, 4), (8, 8), (0, 8)),
    "DTP": ((0, 4), (0, 8), (8, 8)),
    "PTD": ((0, 4), (8, 8), (0, 8)),
    "TPD": ((4, 4), (0, 8), (0, 8)),
    "TDP": ((4, 4), (0, 8), (0, 8)),
}
"""Two nodes of 8, pp 2, tp 4, dp 2: how many of the tp, pp and dp groups cross the node boundary."""


def cube(placement: str) -> Degrees:
    return Degrees(pp=2, dp_shard=2, tp=2, placement=placement)


def digits(found: list[tuple[int, ...]]) -> str:
    return " ".join("".join(map(str, group)) for group in found)


@pytest.mark.parametrize("placement", ALL)
def test_the_groups_of_eight_ranks(placement: str) -> None:
    degrees, order = cube(placement), axes_in_order(placement)
    found = {name: groups(degrees.by_axis, [axis], order) for name, axis in NAMES.items()}
    assert " ".join(f"{name} {digits(members)}" for name, members in found.items()) == CUBE[placement]


NAMES = {"tp": "tp", "pp": "pp", "dp": "dp_shard"}


@pytest.mark.parametrize("placement", PLACES)
def test_the_coordinates_of_eight_ranks(placement: str) -> None:
    degrees, order = cube(placement), axes_in_order(placement)
    places = [coordinates(rank, degrees.by_axis, order) for rank in range(8)]
    assert " ".join(f"{at['dp_shard']}{at['pp']}{at['tp']}" for at in places) == PLACES[placement]


def test_the_worked_example_of_the_developer_guide_is_dtp() -> None:
    """Its second GPU is pipeline stage 1 of tensor rank 0; mp_rank = pp + 2 tp."""
    degrees, order = cube("DTP"), axes_in_order("DTP")
    places = [coordinates(rank, degrees.by_axis, order) for rank in range(8)]
    assert [place["pp"] + 2 * place["tp"] for place in places] == [0, 1, 2, 3] * 2
    assert [place["tp"] + 2 * place["dp_shard"] for place in places] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("placement", "model_groups", "data_groups"),
    [("DPT", "01 23 45 67", "0246 1357"), ("TPD", "04 15 26 37", "0123 4567")],
)
def test_pipeline_without_tensor_parallelism(placement: str, model_groups: str, data_groups: str) -> None:
    degrees, order = Degrees(pp=2, dp_replicate=4, placement=placement), axes_in_order(placement)
    assert digits(groups(degrees.by_axis, ["pp", "tp"], order)) == model_groups
    assert digits(groups(degrees.by_axis, ["dp_replicate", "dp_shard"], order)) == data_groups


@pytest.mark.parametrize("placement", ALL)
def test_groups_that_cross_two_nodes(placement: str) -> None:
    degrees = Degrees(pp=2, dp_shard=2, tp=4, placement=placement)
    found = crossings(degrees, local_size=8)
    assert (found["tp"], found["pp"], found["dp_shard"]) == TWO_NODES[placement]


@pytest.mark.parametrize("placement", ALL)
def test_groups_are_what_coordinates_say(placement: str) -> None:
    """Against the definition, for every axis of a mesh of all six."""
    degrees = Degrees(pp=2, dp_replicate=3, dp_shard=2, cp=2, sp=2, tp=2, placement=placement)
    sizes, order = degrees.by_axis, axes_in_order(placement)
    places = [coordinates(rank, sizes, order) for rank in range(degrees.size)]
    for axes in ([axis] for axis in order):
        gathered: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            gathered.setdefault(tuple(place[axis] for axis in order if axis not in axes), []).append(rank)
        assert groups(sizes, axes, order) == sorted(map(tuple, gathered.values()))


@pytest.mark.parametrize("placement", ALL)
def test_the_ranks_of_one_sequence_and_of_one_copy_are_next_to_each_other(placement: str) -> None:
    degrees = Degrees(dp_replicate=2, dp_shard=3, cp=2, sp=2, placement=placement)
    order = axes_in_order(placement)
    assert groups(degrees.by_axis, ["cp", "sp"], order)[0] == (0, 1, 2, 3)
    assert groups(degrees.by_axis, ["dp_shard", "cp", "sp"], order)[0] == tuple(range(12))


def test_the_plan_takes_the_placement_and_prints_it(make_plan: MakePlan) -> None:
    settings = {"tensor_parallel": 2, "parallel": {"placement": "TPD"}, "zero_optimization": {"stage": 1}}
    with building("tensor_parallel.size"):
        made = make_plan(settings, 4, local_size=2)
        default = make_plan({"tensor_parallel": 2}, 4)
        large = make_plan({"tensor_parallel": 8}, 1024, local_size=8)
    assert made.degrees == Degrees(dp_shard=2, tp=2, placement="TPD")
    text = made.render()
    assert "tp 2 x dp_shard 2, outermost first (placement TPD)" in text
    assert "rank -> tp, dp_shard: 0 -> 0 0, 1 -> 0 1, 2 -> 1 0, 3 -> 1 1" in text
    assert "between nodes: 2 of 2 tp groups; within a node: dp_shard" in text
    assert default.degrees.placement == "PDT"
    assert "nodes" not in default.render()
    places = describe_places(large.degrees)
    assert places.endswith("7 -> 0 7, ..., 1023 -> 127 7")
    assert len(places) < 200
    assert describe_crossings(large.degrees, large.world) == (
        "between nodes: 8 of 8 dp_replicate groups; within a node: tp"
    )


def test_one_axis_needs_no_table() -> None:
    assert not describe_places(Degrees(dp_shard=4))
    assert not describe_crossings(Degrees(dp_shard=4), World(size=4, local_size=4))
    assert (
        describe_crossings(Degrees(dp_shard=4), World(size=4, local_size=2)) == "between nodes: 1 of 1 dp_shard groups"
    )


def test_a_placement_without_effect_is_noted(make_plan: MakePlan) -> None:
    made = make_plan({"parallel": {"placement": "DPT"}}, 4)
    assert messages(made, "parallel.placement") == ["has no effect: only D has a degree above 1"]
    assert messages(make_plan({"parallel": {"placement": "DPT"}}, 1), "parallel.placement") == [
        "has no effect: there is one rank"
    ]
