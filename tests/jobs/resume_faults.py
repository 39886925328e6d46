"""What `ptrain verify-resume --build` is given: one build that is right, and builds with one fault each."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, generator: random.Random | None = None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = self.generator.random() if self.generator is not None else torch.rand(()).item()
        x = torch.linspace(-1, 1, 6) * (index + 1) / 40 + 0.1 * noise
        return {"x": x, "y": x.flip(0)[:2]}


class Disorderly(Points):
    """Samples without noise, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        self.turn += 1
        turned = indices if self.turn % 3 else indices[::-1]
        return [{"x": torch.full((6,), float(index)), "y": torch.ones(2)} for index in turned]


class Counting(nn.Module):
    """``counts``: whether the output depends on how often forward was called, which is no buffer."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.counts, self.num_calls = nn.Linear(6, 8), nn.Linear(8, 2), counts, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_calls += self.counts
        hidden = torch.dropout(self.first(x).tanh(), 0.2, self.training)
        return nn.functional.mse_loss(self.last(hidden) * (1 + self.num_calls / 10), y)


class Forgetful:
    """A schedule without `state_dict`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self) -> None:
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * self.num_steps


def right() -> dict[str, Any]:
    return {"model": Counting(), "training_data": Points()}


def unseeded() -> dict[str, Any]:
    return {"model": Counting(), "training_data": Points(random.Random())}


def seeded_but_not_saved() -> dict[str, Any]:
    return {"model": Counting(), "training_data": Points(random.Random(0))}


def disorderly() -> dict[str, Any]:
    return {"model": Counting(), "training_data": Disorderly()}


def counting() -> dict[str, Any]:
    return {"model": Counting(counts=True), "training_data": Points()}


def forgetful() -> dict[str, Any]:
    return {"model": Counting(), "training_data": Points(), "lr_scheduler": Forgetful}


def broken() -> dict[str, Any]:
    return {"model": Counting()}
