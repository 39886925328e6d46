"""Theme D, resuming: schedules and step counts come back, whoever made them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from tests.parity.runs import pieces_of
from tests.parity.small import Layers, config_of, regression_batch, run_steps, seeded

JSON_SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 12}}


class GroupSteps(torch.optim.Optimizer):
    """Adam that counts its steps in the parameter group, as some do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["first"].lerp_(parameter.grad, 0.1)
                state["second"].lerp_(parameter.grad**2, 0.01)
                first = state["first"] / (1 - 0.9 ** group["step"])
                second = state["second"] / (1 - 0.99 ** group["step"])
                parameter -= group["lr"] * first / (second.sqrt() + 1e-8)


def start(stage: int, schedule: str, optimizer: str) -> engine.Engine:
    model = seeded(Layers)
    config = config_of(stage, 1)
    more: dict[str, Any] = {}
    if optimizer == "in group":
        del config["optimizer"]
        more["optimizer"] = GroupSteps
    if schedule == "json":
        config["scheduler"] = JSON_SCHEDULE
    elif schedule == "callable":
        more["lr_scheduler"] = lambda stepper: torch.optim.lr_scheduler.StepLR(stepper, 3, 0.5)
    elif schedule == "object":
        del config["optimizer"]
        more["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
        more["lr_scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(more["optimizer"], 20)
    return engine.initialize(model=model, config=config, **more)[0]


def ten_steps(stage: int, schedule: str, optimizer: str, folder: Path | None) -> dict[str, Any]:
    """10 steps, with a new model and engine after 5 where there is a ``folder``."""
    model_engine = start(stage, schedule, optimizer)
    rates = []
    for step in range(10):
        if step == 5 and folder is not None:
            model_engine.save_checkpoint(folder)
            model_engine.destroy()
            model_engine = start(stage, schedule, optimizer)
            model_engine.load_checkpoint(folder)
        rates.append(model_engine.get_lr()[0])
        run_steps(model_engine, regression_batch, 1, first=step)
    digest = hashlib.sha256(b"".join(values.numpy().tobytes() for _, _, _, values in pieces_of(model_engine)))
    told = {
        "rates": rates,
        "last_epoch": getattr(model_engine.lr_scheduler, "last_epoch", None),
        "parameters": digest.hexdigest(),
    }
    model_engine.destroy()
    return told


@pytest.mark.parametrize("schedule", ["json", "callable", "object"])
def test_d2_a_schedule_comes_back_whoever_made_it(ranks, tmp_path, schedule):
    straight = ranks(2).run(ten_steps, 1, schedule, "json", None)
    assert ranks(2).run(ten_steps, 1, schedule, "json", tmp_path) == straight
    assert len(set(straight[0]["rates"])) > 3
    assert straight[0]["last_epoch"] == 10


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "in group"])
def test_d9_step_counts_come_back(ranks, tmp_path, stage, optimizer):
    straight = ranks(2).run(ten_steps, stage, "none", optimizer, None)
    assert ranks(2).run(ten_steps, stage, "none", optimizer, tmp_path) == straight
