"""How long ranks wait, measured: stages that sleep for a known time, on real ranks, against the formulas."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.model.pipeline.orders import Action, idle_fraction, timeline
from engine.plan.pipeline_schedules import activations_held, bubble_fraction

RANKS, MICRO_BATCHES, STEPS = 4, 8, 3
UNIT_SECONDS = 0.1
"""Of a forward through all that a rank holds; the gradients of inputs take as long, and those of weights."""
TOLERANCE = 0.03
"""Of the step. What a rank does beside sleeping counts as waiting, so the least idle of a few steps is compared."""

RESTS: list[tuple[float, float]] = []
"""(start, end) of every sleep on this rank, by a clock that all processes of a machine share."""


def rest(seconds: float) -> None:
    start = time.monotonic()
    time.sleep(seconds)
    RESTS.append((start, time.monotonic()))


class OfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        rest(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rest(ctx.seconds)
        return gradient, None


class OfWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rest(ctx.seconds)
        return gradient, None


class Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.before, self.weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return OfInput.apply(x * self.before, self.seconds) * OfWeight.apply(self.weight, self.seconds)


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def run(schedule: str, virtual_stages: int) -> tuple[list[list[tuple[float, float]]], int]:
    """The sleeps of this rank in each step, and the most micro-batches whose activations it kept."""
    model = nn.Sequential(*(Sleeping(UNIT_SECONDS / virtual_stages) for _ in range(RANKS * virtual_stages)))
    config = {
        "train_batch_size": MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "pipeline": {"stages": RANKS, "schedule": schedule, "virtual_stages": virtual_stages, "partition": "uniform"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    model_engine, *_ = engine.initialize(model=model, config=config, loss_fn=square)
    steps = []
    for _ in range(STEPS):
        dist.barrier()
        RESTS.clear()
        model_engine.train_batch((torch.ones(1, 2), torch.zeros(1, 2)) for _ in range(MICRO_BATCHES))
        steps.append(list(RESTS))
    most = model_engine.roles.forward_backward.most_held
    model_engine.destroy()
    return steps, most


def idle(by_rank: list[list[tuple[float, float]]]) -> float:
    busy = sum(end - start for rests in by_rank for start, end in rests)
    total = max(end for rests in by_rank for _, end in rests) - min(start for rests in by_rank for start, _ in rests)
    return 1 - busy / (total * len(by_rank))


def duration(action: Action) -> float:
    """The first stage gets nothing that wants a gradient: its backward is whole, where its weights' half stands."""
    if action.stage == 0 and action.kind in "IW":
        return {"I": 0, "W": 2}[action.kind]
    return 2 if action.kind == "B" else 1


SCHEDULES = [("1f1b", 1, 3 / 11), ("interleaved_1f1b", 2, 3 / 19), ("zero_bubble", 1, 3 / 27)]


@pytest.mark.parametrize(("schedule", "virtual_stages", "fraction"), SCHEDULES)
def test_the_formula_of_each_schedule(schedule: str, virtual_stages: int, fraction: float) -> None:
    assert bubble_fraction(schedule, RANKS, MICRO_BATCHES, virtual_stages) == pytest.approx(fraction)
    slots = timeline(schedule, RANKS, virtual_stages, MICRO_BATCHES, duration)
    assert idle_fraction(slots) == pytest.approx(fraction)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "virtual_stages", "fraction"), SCHEDULES)
def test_ranks_wait_as_long_as_the_formula_says(ranks, schedule: str, virtual_stages: int, fraction: float) -> None:
    by_rank = ranks(RANKS).run(run, schedule, virtual_stages, timeout=240)
    measured = [idle([steps[step] for steps, _ in by_rank]) for step in range(STEPS)]
    assert min(measured) == pytest.approx(fraction, abs=TOLERANCE), measured
    held = [sum(activations_held(schedule, RANKS, MICRO_BATCHES, rank, virtual_stages)) for rank in range(RANKS)]
    assert [most for _, most in by_rank] == held
