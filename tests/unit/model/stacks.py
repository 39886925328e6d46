"""Models, engines and gates of the tests of layer drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.random import stream_seed
from tests.parity.runs import config_of

SMALL = {"num_blocks": 4, "width": 16, "num_heads": 2}
SECTION = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 0.7}}


class Stack(nn.Module):
    """(batch, sequence, 8) -> a loss, through ``layers``; ``call`` calls one."""

    def __init__(self, layers: list[nn.Module], call: Callable[[nn.Module, Tensor], Any] = nn.Module.__call__):
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers), call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            output = self.call(layer, x)
            x = output if isinstance(output, Tensor) else output[0]
        return x.square().mean()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.linear(x).tanh()


def start(model: nn.Module, **more: Any) -> engine.Engine:
    settings = {"train_batch_size": 4, **config_of(stage=0), **SECTION, **more}
    return engine.initialize(model=model, config={**settings, "train_batch_size": 4})[0]


@pytest.fixture
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def gates_at(global_steps: int, micro_step: int, theta: float, num_layers: int = 4, seed: int = 0) -> list[bool]:
    return [
        stream_seed(seed, "layer_drop", global_steps, micro_step, layer) / 2**63 < 1 - layer / num_layers * (1 - theta)
        for layer in range(1, num_layers + 1)
    ]
