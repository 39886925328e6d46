"""Difficulty schedules: the published values, their ends, and DeepSpeed's ways."""

from __future__ import annotations

import math

import pytest

from engine.contracts import EngineError
from engine.data.curriculum import difficulty_at
from engine.plan import DifficultySchedule

LINEAR = DifficultySchedule("fixed_linear", 8, 1024, total_steps=15000, step_size=8)
ROOT = DifficultySchedule("fixed_root", 8, 1024, total_steps=15000, step_size=8, root_degree=2.0)


@pytest.mark.parametrize(
    ("step", "difficulty"), [(1, 8), (118, 8), (119, 16), (7500, 512), (14881, 1008), (14882, 1016), (15000, 1024)]
)
@pytest.mark.parametrize("deepspeed", [False, True])
def test_linear_values(step: int, difficulty: int, deepspeed: bool) -> None:
    schedule = DifficultySchedule("fixed_linear", 8, 1024, 15000, 8, deepspeed=deepspeed)
    assert difficulty_at(schedule, step) == difficulty


def test_half_of_the_tokens_are_used() -> None:
    total = sum(difficulty_at(LINEAR, step) for step in range(1, 15001))
    assert total == 7_680_512
    assert total / (1024 * 15000) == pytest.approx(0.50003, abs=1e-5)


@pytest.mark.parametrize(("step", "difficulty"), [(1, 16), (10, 32), (3750, 512), (15000, 1024), (99999, 1024)])
def test_root_values(step: int, difficulty: int) -> None:
    assert difficulty_at(ROOT, step) == difficulty


def test_both_ends_are_met() -> None:
    ours = DifficultySchedule("fixed_linear", 10, 1000, total_steps=500, step_size=16)
    assert [difficulty_at(ours, step) for step in (1, 499, 500, 501)] == [10, 992, 1000, 1000]
    assert all(10 <= difficulty_at(ours, step) <= 1000 for step in range(1, 600))


def test_deepspeed_misses_both_ends() -> None:
    low = DifficultySchedule("fixed_linear", 10, 1000, total_steps=500, step_size=8, deepspeed=True)
    assert difficulty_at(low, 1) == 8
    high = DifficultySchedule("fixed_linear", 8, 1000, total_steps=500, step_size=16, deepspeed=True)
    assert difficulty_at(high, 500) == 992
    first = next(step for step in range(1, 1000) if difficulty_at(high, step) == 1000)
    assert first == math.ceil((1008 - 8) / (1000 - 8) * 500)


def test_a_product_of_floats_does_not_fall_short() -> None:
    """0.29 * 100 is 28.999...: the exact quotient is 29."""
    schedule = DifficultySchedule("fixed_linear", 0, 100, total_steps=100, step_size=1)
    assert [difficulty_at(schedule, step) for step in range(1, 101)] == list(range(1, 101))


def test_discrete() -> None:
    schedule = DifficultySchedule("fixed_discrete", 1, 3, difficulties=(1, 2, 3), last_steps=(5, 10))
    assert [difficulty_at(schedule, step) for step in (1, 5, 6, 10, 11, 1000)] == [1, 1, 2, 2, 3, 3]


def test_deepspeed_stops_at_the_first_difficulty_that_reaches_the_maximum() -> None:
    theirs = DifficultySchedule(
        "fixed_discrete", 32, 64, difficulties=(32, 64, 128), last_steps=(10, 20), deepspeed=True
    )
    assert [difficulty_at(theirs, step) for step in (10, 11, 20, 21, 99)] == [32, 64, 64, 64, 64]


def test_custom() -> None:
    schedule = DifficultySchedule("custom", 2, 9)
    assert [difficulty_at(schedule, step, lambda step: 2 * step) for step in (1, 3, 50)] == [2, 6, 9]
    with pytest.raises(EngineError, match="set_custom_curriculum_learning_schedule"):
        difficulty_at(schedule, 1)
    with pytest.raises(EngineError, match="returned 'x' at step 7"):
        difficulty_at(schedule, 7, lambda step: "x")  # type: ignore[arg-type, return-value]
