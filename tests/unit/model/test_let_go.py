"""An engine that nobody holds any more is let go with its model, gradients and masters, also without `destroy`."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import engine


def still_there(stage: int) -> list[str]:
    """Train a step, drop everything, and say what has outlived it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3}}
    model_engine, *rest = engine.initialize(model=model, config=config)
    model_engine.backward(model_engine(torch.ones(2, 8)).sum())
    model_engine.step()
    kept = {"engine": model_engine, "model": model, "gradients and masters": model_engine.roles.reduction}
    left = {name: weakref.ref(thing) for name, thing in kept.items()}
    del model, model_engine, rest, kept
    gc.collect()
    return [name for name, thing in left.items() if thing() is not None]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_engine_that_is_dropped_is_let_go(ranks, stage):
    assert ranks(2).run(still_there, stage) == [[], []]
