"""Bytes per rank against ZeRO's formula, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import MemoryEstimate, ModelFacts, estimate_memory
from engine.plan.estimates import MOMENTS, format_bytes
from engine.plan.optimizer_table import OPTIMIZERS
from tests.plan.conftest import MakePlan

FACTS = ModelFacts(num_parameters=1000, num_trainable_parameters=1000, blocks=("h.0", "h.1"), num_block_parameters=300)


def estimate(make_plan: MakePlan, stage: int, size: int, facts: ModelFacts = FACTS, **settings: Any) -> MemoryEstimate:
    zero = {"zero_optimization": {"stage": stage, **({"prefetch_bucket_size": 0} if stage == 3 else {})}}
    made = make_plan({"optimizer": {"type": "AdamW", "params": {}}, **zero, **settings}, size)
    return estimate_memory(made, facts)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, (4000, 4000, 8000, 0)), (1, (4000, 4000, 4000, 0)), (2, (4000, 2000, 4000, 0)), (3, (2000, 2000, 4000, 1200))],
)
def test_fp32_over_two_ranks(make_plan: MakePlan, stage: int, expected: tuple[int, ...]) -> None:
    made = estimate(make_plan, stage, 2)
    assert made == MemoryEstimate(*expected)
    assert made.total_bytes == sum(expected)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, (2000, 4000, 12000, 0)), (1, (2000, 4000, 3000, 0)), (2, (2000, 1000, 3000, 0)), (3, (1000, 1000, 2000, 600))],
)
def test_bf16_over_four_ranks_keeps_fp32_masters(make_plan: MakePlan, stage: int, expected: tuple[int, ...]) -> None:
    assert estimate(make_plan, stage, 4, bf16={"enabled": True}) == MemoryEstimate(*expected)


def test_tp_ranks_and_stages_hold_parts(make_plan: MakePlan) -> None:
    split = {"tensor_parallel": {"size": 2}, "pipeline": {"stages": 2}}
    assert estimate(make_plan, 1, 8, **split) == MemoryEstimate(1000, 1000, 1000, 0)
    sharded = estimate(make_plan, 3, 8, **split)
    assert sharded == MemoryEstimate(500, 500, 1000, 600)


def test_frozen_parameters_and_uneven_shards(make_plan: MakePlan) -> None:
    facts = ModelFacts(num_parameters=10, num_trainable_parameters=7)
    assert estimate(make_plan, 2, 2, facts) == MemoryEstimate(40, 16, 32, 0)


def test_an_optimizer_of_the_users_own_is_unknown(make_plan: MakePlan) -> None:
    made = estimate(make_plan, 2, 2, optimizer={"type": "my.Optimizer", "params": {}})
    assert made.optimizer_bytes is None
    assert made.total_bytes is None


def test_state_of_every_optimizer_is_known() -> None:
    assert set(MOMENTS) == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (207_600_000, "208 MB"), (999_900_000, "1 GB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
