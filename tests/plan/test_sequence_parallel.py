"""What the plan says of sequences that are cut over ranks: lengths, heads, and what does not go with it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ConfigError
from engine.plan import ModelFacts
from engine.plan.sequence_parallel import length_unit
from engine.plan.tensor_parallel import SplitSizes
from tests.plan.conftest import MakePlan, ProblemsOf

ULYSSES = {"sequence_parallel_size": 2}
RING = {"parallel": {"context_parallel": 2}}


@pytest.mark.parametrize(("cp", "sp", "unit"), [(1, 1, 1), (1, 3, 3), (2, 1, 4), (2, 2, 4), (2, 3, 12), (3, 4, 12)])
def test_lengths_that_can_be_cut(cp: int, sp: int, unit: int) -> None:
    assert length_unit(cp, sp) == unit
    assert unit % (cp * sp) == 0
    assert cp == 1 or unit % (2 * cp) == 0


def test_ranks_of_one_sequence_share_its_samples(make_plan: MakePlan) -> None:
    made = make_plan({**ULYSSES, **RING}, 8)
    assert (made.degrees.cp, made.degrees.sp, made.degrees.dp) == (2, 2, 2)
    assert made.batch.global_batch_size == 2 * made.batch.micro_batch_size


def test_the_length_of_the_data(problems_of: ProblemsOf) -> None:
    settings = {"model": {"target": "model.py:GPT"}, "data": {"path": "data.txt", "sequence_length": 30}, **RING}
    (problem,) = problems_of(settings, 2)
    assert problem.path == "data.sequence_length"
    assert "30 = 7 x 4 + 2" in problem.message
    assert "28 or 32" in problem.repair


def test_heads(make_plan: MakePlan) -> None:
    facts = ModelFacts(num_parameters=1, num_trainable_parameters=1, split_sizes=SplitSizes(num_heads=6))
    with pytest.raises(ConfigError) as caught:
        make_plan({"sequence_parallel_size": 4}, 4, facts)
    (problem,) = caught.value.problems
    assert problem.path == "sequence_parallel_size"
    assert "6 = 1 x 4 + 2" in problem.message
    assert "set 2 or 3" in problem.repair


def curriculum(low: int, high: int, step: int) -> dict[str, Any]:
    settings = {"total_curriculum_step": 10, "difficulty_step": step}
    section = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": low, "max_difficulty": high}
    return {"curriculum_learning": {**section, "schedule_type": "fixed_linear", "schedule_config": settings}}


def test_cuts_of_a_curriculum(problems_of: ProblemsOf, make_plan: MakePlan) -> None:
    make_plan({**curriculum(8, 64, 8), **RING}, 2)
    found = problems_of({**curriculum(6, 64, 2), **RING}, 2)
    assert {problem.path.rpartition(".")[2] for problem in found} == {"min_difficulty", "difficulty_step"}
    assert all("multiples of 4" in problem.allowed for problem in found)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 10}}}, "averages momentum"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages"),
    ],
)
def test_what_does_not_go_with_slices(problems_of: ProblemsOf, other: dict[str, Any], words: str) -> None:
    found = problems_of({**ULYSSES, **other}, 4)
    assert any(problem.path == "sequence_parallel_size" and words in problem.message for problem in found)
