"""Replicas and shards: plain stages, MiCS, hpZ, and what does not fit."""

from __future__ import annotations

import pytest

from tests.plan.conftest import MakePlan, ProblemsOf, messages

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
