"""Processes that train and save until they are killed.

Run as ``python -m tests.parity.saver``: for every line ``FOLDER BACKGROUND`` on standard input it forks a child, which
prints its process id, then a line after each save that returned; "ended" follows when it is gone. Importing torch is
what a start costs; a fork is free.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import engine

SIZE = 400


class Heavy(nn.Module):
    """A linear layer large enough for a save to take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def start(background: bool) -> engine.Engine:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"async": background, "keep_last": 3},
        "seed": 0,
    }
    return engine.initialize(model=Heavy(), config=config)[0]


def step(model_engine: engine.Engine) -> None:
    generator = torch.Generator().manual_seed(model_engine.global_steps)
    model_engine.backward(model_engine(torch.randn(2, SIZE, generator=generator)))
    model_engine.step()


def fingerprint(model_engine: engine.Engine) -> list[float]:
    """Changes in every step with every parameter and moment."""
    assert model_engine.optimizer is not None
    state = model_engine.optimizer.named_state()
    tensors = [*model_engine.module.parameters()]
    tensors += [state[name][key] for name in sorted(state) for key in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.detach().double().sum().item() for tensor in tensors]


def save_for_ever(folder: str, background: bool) -> None:
    print(os.getpid(), flush=True)
    model_engine = start(background)
    while True:
        step(model_engine)
        model_engine.save_checkpoint(folder, client_state={"fingerprint": fingerprint(model_engine)})
        print("saved", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, background = line.split()
        child = os.fork()
        if child == 0:
            save_for_ever(folder, background == "True")
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
