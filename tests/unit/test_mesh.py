"""The process groups of a mesh: whom they join under each placement, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.mesh import Mesh
from engine.plan import Degrees
from engine.plan.placement import axes_in_order, groups
from tests.parity.tiers import slow

FOUR = [
    Degrees(dp_shard=2, tp=2, placement="PDT"),
    Degrees(dp_shard=2, tp=2, placement="TPD"),
    Degrees(pp=2, dp_replicate=2, placement="DPT"),
    Degrees(pp=2, tp=2, placement="TDP"),
    Degrees(dp_replicate=2, dp_shard=2, placement="DTP"),
]
EIGHT = [Degrees(pp=2, dp_shard=2, tp=2, placement=placement) for placement in ("DPT", "PTD")]


def place_of(degrees: Degrees) -> dict[str, Any]:
    """On one rank: its data shard, and by axis the members of its group and the sum of their ranks over it."""
    mesh = Mesh(degrees, torch.device("cpu"))
    members, sums = {}, {}
    for axis, size in mesh.degrees.items():
        group = mesh.group(axis)
        assert (group is None) == (size == 1)
        if group is not None:
            total = torch.tensor(mesh.rank)
            dist.all_reduce(total, group=group)
            members[axis], sums[axis] = tuple(dist.get_process_group_ranks(group)), int(total)
    both = mesh.device_mesh("dp_shard", "dp_replicate")  # in whatever order they are asked for
    return {"dp_rank": mesh.dp_rank, "members": members, "sums": sums, "data": both.mesh_dim_names}


def places_of(cases: list[Degrees]) -> list[dict[str, Any]]:
    return [place_of(degrees) for degrees in cases]


@pytest.mark.parametrize("cases", [FOUR, slow(EIGHT)], ids=["4 ranks", "8 ranks"])
def test_groups_join_the_ranks_that_the_plan_prints(ranks: Any, cases: list[Degrees]) -> None:
    found = ranks(cases[0].size).run(places_of, cases)
    for index, degrees in enumerate(cases):
        places = [of_rank[index] for of_rank in found]
        sizes, order = degrees.by_axis, axes_in_order(degrees.placement)
        for axis in (axis for axis in order if sizes[axis] > 1):
            group_of = {rank: group for group in groups(sizes, [axis], order) for rank in group}
            assert [place["members"][axis] for place in places] == [group_of[rank] for rank in range(degrees.size)]
            assert [place["sums"][axis] for place in places] == [sum(group_of[rank]) for rank in range(degrees.size)]
        for shard in range(degrees.dp):
            of_shard = tuple(rank for rank, place in enumerate(places) if place["dp_rank"] == shard)
            assert of_shard in groups(sizes, ["pp", "cp", "sp", "tp"], order), "each copy of the model has one shard"
        if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
            assert all(place["data"] == ("dp_replicate", "dp_shard") for place in places)


def groups_of_two_meshes() -> tuple[bool, bool]:
    """Whether two meshes laid out alike have the same group, and whether one laid out otherwise has another."""
    first, second = (Mesh(Degrees(dp_shard=2, tp=2), torch.device("cpu")) for _ in range(2))
    other = Mesh(Degrees(dp_shard=2, tp=2, placement="TPD"), torch.device("cpu"))
    return first.group("tp") is second.group("tp"), first.group("tp") is not other.group("tp")


def test_engines_laid_out_alike_share_their_groups(ranks: Any) -> None:
    assert ranks(4).run(groups_of_two_meshes) == [(True, True)] * 4
