"""Degrees: what the model's axes leave to data parallelism; plain stages, MiCS, hpZ; what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import load_config
from engine.plan import fitting_world
from tests.building import building
from tests.plan.conftest import MakePlan, ProblemsOf, messages

AXES = {
    "pp": ("pipeline.stages", lambda size: {"pipeline": {"stages": size}}),
    "cp": ("parallel.context_parallel", lambda size: {"parallel": {"context_parallel": size}}),
    "sp": ("sequence_parallel_size", lambda size: {"sequence_parallel_size": size}),
    "tp": ("tensor_parallel.size", lambda size: {"tensor_parallel": {"size": size}}),
}
MODEL_KEYS = tuple(path for path, _ in AXES.values())
MICS, HPZ = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"


@pytest.mark.parametrize(("stage", "replicate", "shard"), [(0, 6, 1), (1, 1, 6), (2, 1, 6), (3, 1, 6)])
def test_stage_zero_replicates_and_the_others_shard(
    make_plan: MakePlan, stage: int, replicate: int, shard: int
) -> None:
    made = make_plan({"zero_optimization": {"stage": stage}}, 6)
    assert (made.degrees.dp_replicate, made.degrees.dp_shard, made.degrees.dp) == (replicate, shard, 6)
    assert made.zero.reshard_after_forward is (stage == 3)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_mics_shards_in_groups(make_plan: MakePlan, size: int) -> None:
    made = make_plan({"zero_optimization": {"stage": 3, "mics_shard_size": size}}, 6)
    assert (made.degrees.dp_replicate, made.degrees.dp_shard) == (6 // size, size)


def test_mics_must_divide_the_ranks(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, 6)
    assert problem.path == MICS
    assert "6 = 1 x 4 + 2" in problem.message
    assert problem.allowed == "1, 2, 3, 6"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_mics_and_hpz_need_stage_three(problems_of: ProblemsOf, stage: int) -> None:
    found = problems_of({"zero_optimization": {"stage": stage, "mics_shard_size": 2, "zero_hpz_partition_size": 2}}, 4)
    assert {problem.path for problem in found} == {MICS, HPZ}


def test_hpz_keeps_parameters_in_smaller_groups(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    made = make_plan({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, 4)
    assert made.zero.reshard_after_forward == 2
    assert made.zero.reshard_after_forward is not True
    (problem,) = problems_of({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, 4)
    assert problem.allowed == "1, 2, 4"


def test_hpz_over_all_ranks_is_plain_stage_three(make_plan: MakePlan) -> None:
    made = make_plan({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, 4)
    assert made.zero.reshard_after_forward is True
    assert "plain stage 3" in messages(made, HPZ)[0]


def test_hpz_divides_the_shard_group_of_mics(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    both = {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 2}
    made = make_plan({"zero_optimization": both}, 8)
    assert (made.degrees.dp_replicate, made.degrees.dp_shard, made.zero.reshard_after_forward) == (2, 4, 2)
    (problem,) = problems_of({"zero_optimization": {**both, "zero_hpz_partition_size": 8}}, 8)
    assert problem.path == HPZ


def test_more_ranks_than_accelerators(problems_of: ProblemsOf, make_plan: MakePlan) -> None:
    (problem,) = problems_of({}, 4, device="cuda", device_count=2)
    assert "4 ranks" in problem.message
    assert make_plan({}, 4, device="cuda", device_count=4).degrees.dp == 4


def asking(**degrees: int) -> dict[str, Any]:
    return {key: value for axis, size in degrees.items() for key, value in AXES[axis][1](size).items()}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("degrees", "world", "dp"),
    [
        ({"tp": 2}, 4, 2),
        ({"tp": 4}, 4, 1),
        ({"sp": 2}, 6, 3),
        ({"cp": 2}, 4, 2),
        ({"pp": 3}, 6, 2),
        ({"pp": 2, "tp": 2}, 8, 2),
        ({"cp": 2, "sp": 3, "tp": 5}, 120, 4),
    ],
)
def test_the_model_axes_divide_the_world(
    make_plan: MakePlan, stage: int, degrees: dict[str, int], world: int, dp: int
) -> None:
    with building(*MODEL_KEYS):
        made = make_plan({**asking(**degrees), "zero_optimization": {"stage": stage}}, world)
    assert {axis: getattr(made.degrees, axis) for axis in AXES} == {**dict.fromkeys(AXES, 1), **degrees}
    assert (made.degrees.dp_replicate, made.degrees.dp_shard) == ((dp, 1) if stage == 0 else (1, dp))
    assert made.degrees.size == world
    assert made.batch.global_batch_size == 2 * dp
    assert {value.path for value in made.values} >= {AXES[axis][0] for axis in degrees}


def test_mics_groups_divide_the_data_parallel_ranks(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    zero = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    with building(*MODEL_KEYS):
        made = make_plan({**asking(tp=2), **zero}, 8)
        assert (made.degrees.dp_replicate, made.degrees.dp_shard, made.degrees.tp) == (2, 2, 2)
        (problem,) = problems_of({**asking(tp=2), **zero}, 6)
    assert problem.path == MICS
    assert "3 = 1 x 2 + 1" in problem.message


@pytest.mark.parametrize("spelling", [{"size": 2}, {"autotp_size": 2}, 2])
def test_the_spellings_of_the_tensor_degree(make_plan: MakePlan, spelling: Any) -> None:
    with building(*MODEL_KEYS):
        made = make_plan({"tensor_parallel": spelling}, 4)
    assert (made.degrees.tp, made.degrees.dp) == (2, 2)
    assert made.config.tensor_parallel is not None
    assert made.config.tensor_parallel.size == 2


def test_a_tensor_degree_that_is_no_degree(problems_of: ProblemsOf) -> None:
    for spelling in (-1, {"size": -1}, {"autotp_size": -1}):
        with pytest.raises(Exception, match="-1"):
            load_config({"tensor_parallel": spelling})
    with pytest.raises(Exception, match="1 or 2"):
        load_config({"tensor_parallel": {"size": 2, "tensor_parallel": {"tp_size": 4}}})


@pytest.mark.parametrize(
    ("degrees", "world", "path", "message", "repair"),
    [
        (
            {"tp": 4},
            6,
            "tensor_parallel.size",
            "tensor_parallel.size 4 (given) does not divide the ranks of world size 6: 6 = 1 x 4 + 2",
            "start 4 or 8 ranks, or set tensor_parallel.size to 3 or 6",
        ),
        (
            {"pp": 2, "tp": 4},
            12,
            "tensor_parallel.size",
            "pipeline.stages 2 (given) x tensor_parallel.size 4 (given) = 8 does not divide the ranks of world size "
            "12: 12 = 1 x 8 + 4",
            "start 8 or 16 ranks, or set pipeline.stages to 1 or 3, or tensor_parallel.size to 3 or 6",
        ),
        (
            {"sp": 3},
            2,
            "sequence_parallel_size",
            "sequence_parallel_size 3 (given) ranks are needed for one copy of the model, more than there are in world "
            "size 2",
            "start 3 ranks, or set sequence_parallel_size to 2",
        ),
    ],
)
def test_degrees_that_do_not_multiply(
    problems_of: ProblemsOf, degrees: dict[str, int], world: int, path: str, message: str, repair: str
) -> None:
    with building(*MODEL_KEYS):
        (problem,) = problems_of({**asking(**degrees), "train_batch_size": 7 * world}, world)
    assert (problem.path, problem.message, problem.repair) == (path, message, repair)


def test_a_repair_fits(problems_of: ProblemsOf, make_plan: MakePlan) -> None:
    """Each degree that a message offers makes a plan, for every world up to 24."""
    with building(*MODEL_KEYS):
        for world in range(2, 25):
            for tp in range(2, 10):
                if world % tp == 0:
                    continue
                (problem,) = problems_of(asking(tp=tp), world)
                start, _, degrees = problem.repair.partition(", or set ")
                for size in start.split()[1:-1]:
                    assert size == "or" or make_plan(asking(tp=tp), int(size)).degrees.tp == tp
                for size in degrees.split()[2:]:
                    assert size == "or" or make_plan(asking(tp=int(size)), world).degrees.tp == int(size)


def test_data_parallel_size_is_checked_beside_sequence_parallelism(
    make_plan: MakePlan, problems_of: ProblemsOf
) -> None:
    with building(*MODEL_KEYS):
        assert not messages(make_plan({**asking(sp=2), "data_parallel_size": 2}, 4), "data_parallel_size")
        (problem,) = problems_of({**asking(sp=2), "data_parallel_size": 3}, 4)
    assert (problem.path, problem.found, problem.allowed) == ("data_parallel_size", 3, "2")
    assert "4 / (2) = 2" in problem.message
    assert problem.repair == "remove the key, or start 6 ranks"
    assert messages(make_plan({"data_parallel_size": 3}, 4), "data_parallel_size") == [
        "has no effect: world size 4 has 4 data-parallel ranks"
    ]


def test_the_fitting_world_holds_one_copy() -> None:
    assert fitting_world(load_config({"train_batch_size": 8, **asking(tp=4, pp=2)})).size == 8
    assert fitting_world(load_config({"data_parallel_size": 3, "train_batch_size": 6, **asking(sp=2)})).size == 6
