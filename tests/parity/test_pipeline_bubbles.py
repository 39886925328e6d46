"""How long ranks wait, measured: stages with artificial times, on real ranks, against the formulas.

Seconds would measure the machine: where ranks share two cores, what a rank does beside its stage takes as long as a
stage. So each rank has a clock of its own that moves by a stage's time whenever the stage runs, and what travels
carries the sender's time along, which the receiver's clock then waits for. The orders, the transfers and who waits for
what are those of the run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.model.pipeline.orders import Action, idle_fraction, timeline
from engine.plan.pipeline_schedules import activations_held, bubble_fraction

RANKS, MICRO_BATCHES, STEPS = 4, 8, 2
TIME = 1
"""The column of hidden states, and of their gradients, that carries the time."""


class Clock:
    """Of this rank, in forwards through all that it holds. ``spans``: (start, end) of what its stages did."""

    now = 0.0
    spans: list[tuple[float, float]] = []  # noqa: RUF012

    @classmethod
    def wait_for(cls, travelled: Tensor) -> None:
        cls.now = max(cls.now, travelled[0, TIME].item())

    @classmethod
    def work(cls, duration: float) -> None:
        cls.spans.append((cls.now, cls.now + duration))
        cls.now += duration

    @classmethod
    def stamp(cls, tensor: Tensor) -> Tensor:
        stamped = tensor.clone()
        stamped[0, TIME] = cls.now
        return stamped


class OfInput(torch.autograd.Function):
    """Forward, and the half of backward that gives the gradients of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, duration: float) -> Tensor:
        ctx.duration = duration
        Clock.wait_for(x)
        Clock.work(duration)
        return Clock.stamp(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Clock.work(ctx.duration)
        return Clock.stamp(gradient), None


class OfWeight(torch.autograd.Function):
    """The other half. In a whole backward it runs before the first one, whose end is then that of both."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, duration: float) -> Tensor:
        ctx.duration = duration
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Clock.work(ctx.duration)
        return gradient, None


class Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Clock.wait_for(gradient)
        return gradient


class Timed(nn.Module):
    """Multiplies by ones, for which it takes ``duration`` in forward and twice that in backward."""

    def __init__(self, duration: float) -> None:
        super().__init__()
        self.duration = duration
        self.before, self.weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        worked = OfInput.apply(x * self.before, self.duration)
        return Arrival.apply(worked * OfWeight.apply(self.weight, self.duration))


def of_values(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target[:, 0]).square().mean()


def run(schedule: str, virtual_stages: int) -> tuple[list[list[tuple[float, float]]], int]:
    """When this rank worked in each step, and the most micro-batches whose activations it kept."""
    model = nn.Sequential(*(Timed(1 / virtual_stages) for _ in range(RANKS * virtual_stages)))
    config = {
        "train_batch_size": MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "pipeline": {"stages": RANKS, "schedule": schedule, "virtual_stages": virtual_stages, "partition": "uniform"},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-12}},
    }
    model_engine, *_ = engine.initialize(model=model, config=config, loss_fn=of_values)
    steps = []
    for _ in range(STEPS):
        Clock.now, Clock.spans = 0.0, []
        model_engine.train_batch((torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)) for _ in range(MICRO_BATCHES))
        steps.append(Clock.spans)
    most = model_engine.roles.forward_backward.most_held
    model_engine.destroy()
    return steps, most


def idle(by_rank: list[list[tuple[float, float]]]) -> float:
    busy = sum(end - start for spans in by_rank for start, end in spans)
    return 1 - busy / (max(end for spans in by_rank for _, end in spans) * len(by_rank))


def duration(action: Action) -> float:
    """The first stage gets nothing that wants a gradient: its backward is whole, where its weights' half stands."""
    if action.stage == 0 and action.kind in "IW":
        return {"I": 0, "W": 2}[action.kind]
    return 2 if action.kind == "B" else 1


SCHEDULES = [("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved_1f1b", 2, 3 / 19), ("zero_bubble", 1, 3 / 27)]


@pytest.mark.parametrize(("schedule", "virtual_stages", "fraction"), SCHEDULES)
def test_the_formula_of_each_schedule(schedule: str, virtual_stages: int, fraction: float) -> None:
    assert bubble_fraction(schedule, RANKS, MICRO_BATCHES, virtual_stages) == pytest.approx(fraction)
    slots = timeline(schedule, RANKS, virtual_stages, MICRO_BATCHES, duration)
    assert idle_fraction(slots) == pytest.approx(fraction)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "virtual_stages", "fraction"), SCHEDULES)
def test_ranks_wait_as_long_as_the_formula_says(ranks, schedule: str, virtual_stages: int, fraction: float) -> None:
    by_rank = ranks(RANKS).run(run, schedule, virtual_stages, timeout=240)
    assert [idle([steps[step] for steps, _ in by_rank]) for step in range(STEPS)] == pytest.approx([fraction] * STEPS)
    held = [sum(activations_held(schedule, RANKS, MICRO_BATCHES, rank, virtual_stages)) for rank in range(RANKS)]
    assert [most for _, most in by_rank] == held
