"""Learning rates that decay by the tokens seen, and the exponential range test."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from engine.contracts import EngineError, SavedLayout
from engine.optim.schedule_factory import build_schedule
from engine.optim.schedule_state import ScheduleState
from engine.plan.plan import SchedulePlan

LAYOUT = SavedLayout(world_size=1, zero_stage=0, mesh={}, global_batch_size=1)


def build(type_name: str, **params: Any) -> Any:
    return build_schedule(SchedulePlan(type_name, params), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0))


def sequence(scheduler: Any, num_steps: int) -> list[float]:
    """The learning rates that the first ``num_steps`` optimizer steps use."""
    used = []
    for _ in range(num_steps):
        used.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        scheduler.optimizer.step()
        scheduler.step()
    return used


def walk(scheduler: Any, tokens_per_step: list[int], seen: int = 0) -> list[float]:
    used = []
    for tokens in tokens_per_step:
        used.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        seen += tokens
        scheduler.see_tokens(seen)
        scheduler.optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("type_name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_equally_many_tokens_a_step_give_the_rates_of_a_decay_in_steps(type_name: str, warmup: int) -> None:
    params = {"warmup_num_steps": warmup, "warmup_type": "linear"}
    expected = sequence(build(type_name, total_num_steps=20, **params), 25)
    assert walk(build(type_name, total_num_tokens=20 * 96, **params), [96] * 25) == pytest.approx(expected, abs=1e-12)


def test_a_token_decay_waits_for_short_sequences() -> None:
    tokens = [10, 10, 20, 40, 80, 160]
    schedule = build("WarmupCosineLR", total_num_tokens=sum(tokens), warmup_num_steps=2, cos_min_ratio=0.0)
    left = [(sum(tokens[:k]) - 20) / (sum(tokens) - 20) for k in range(2, 6)]
    assert walk(schedule, tokens)[2:] == pytest.approx([(1 + math.cos(math.pi * x)) / 2 for x in left])
    assert schedule.get_last_lr() == [pytest.approx(0.0, abs=1e-12)]


@pytest.mark.parametrize("type_name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_token_decay_survives_a_restart(type_name: str) -> None:
    tokens = [3 * k for k in range(1, 20)]
    params = {"total_num_tokens": sum(tokens), "warmup_num_steps": 4}
    whole = walk(build(type_name, **params), tokens)
    first, second = build(type_name, **params), build(type_name, **params)
    walk(first, tokens[:9])
    ScheduleState(second).load(json.loads(json.dumps(ScheduleState(first).state())), LAYOUT)
    assert walk(second, tokens[9:], sum(tokens[:9])) == pytest.approx(whole[9:], abs=1e-15)
    in_steps = ScheduleState(build(type_name, total_num_steps=30)).state()
    with pytest.raises(EngineError, match="counts steps, this run's total_num_tokens"):
        ScheduleState(second).load(in_steps, LAYOUT)


def test_a_decay_is_measured_in_one_thing() -> None:
    with pytest.raises(EngineError, match="total_num_steps and total_num_tokens"):
        build("WarmupDecayLR", total_num_steps=3, total_num_tokens=3)


def test_an_exponential_range_test() -> None:
    schedule = build(
        "LRRangeTest", lr_range_test_min_lr=1e-6, lr_range_test_step_size=6, lr_range_test_step_rate=1e6 - 1,
        lr_range_test_growth="exponential",
    )  # fmt: skip
    assert sequence(schedule, 7) == pytest.approx([10.0**power for power in range(-6, 1)])
    with pytest.raises(EngineError, match='"linear" or "exponential", not \'square\''):
        build("LRRangeTest", lr_range_test_growth="square")
