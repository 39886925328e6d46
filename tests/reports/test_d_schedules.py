"""Learning-rate schedules: counted in optimizer steps, once per step, answered at any time, restored with the run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import engine
from tests.parity.runs import assemble, pieces_of
from tests.parity.small import Case, Layers, config_of, regression_batch, run_steps, seeded
from tests.parity.toy import part

WORLD = 2
STAGES = range(4)
LR = 0.1
SGD = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 10, "warmup_max_lr": LR}}


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=10)


def client(model: torch.nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": cosine(optimizer)}


def wrapped(model: torch.nn.Module) -> dict[str, Any]:
    """A user's wrapper with a state of its own, as integrations write them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step))}


KINDS: dict[str, tuple[Callable[[torch.nn.Module], dict[str, Any]], dict[str, Any]]] = {
    "JSON": (lambda model: {}, {"optimizer": SGD, "scheduler": DECAY}),
    "object": (client, {}),
    "callable": (lambda model: {"lr_scheduler": cosine}, {"optimizer": SGD}),
    "lambda": (wrapped, {}),
}


def made(kind: str, stage: int = 1, accumulation: int = 1) -> engine.Engine:
    arguments, more = KINDS[kind]
    model = seeded(Layers)
    config = config_of(stage, accumulation, **more)
    if not more.get("optimizer"):
        del config["optimizer"]
    return engine.initialize(model=model, config=config, **arguments(model))[0]


def rates(model_engine: engine.Engine, steps: int, first: int = 0) -> list[tuple[float, int]]:
    seen = []
    for step in range(first, first + steps):
        run_steps(model_engine, regression_batch, 1, first=step)
        seen.append((model_engine.get_lr()[0], model_engine.lr_scheduler.last_epoch))
    return seen


def resume(kind: str, folder: str) -> dict[str, Any]:
    straight = rates(made(kind), 8)
    first = made(kind)
    before = rates(first, 5)
    first.save_checkpoint(folder)
    second = made(kind)
    second.load_checkpoint(folder)
    loaded = second.get_lr()[0], second.lr_scheduler.last_epoch
    after = rates(second, 3, first=5)
    return {"straight": straight, "resumed": before + after, "loaded": loaded, "saved": before[-1]}


@pytest.mark.parametrize("kind", KINDS)
def test_d2_every_kind_of_schedule_is_saved_and_restored(ranks, kind, tmp_path: Path):
    for seen in ranks(WORLD).run(resume, kind, str(tmp_path)):
        assert seen["loaded"] == seen["saved"]
        assert seen["resumed"] == seen["straight"]
        assert len({lr for lr, _ in seen["straight"]}) > 4


def load_without_schedule(folder: str) -> tuple[str, int]:
    first = engine.initialize(model=seeded(Layers), config=config_of(1, 1, optimizer=SGD))[0]
    run_steps(first, regression_batch, 1)
    first.save_checkpoint(folder)
    second, message = made("JSON"), "nothing was raised"
    try:
        second.load_checkpoint(folder)
    except engine.EngineError as error:
        message = str(error)
    second.load_checkpoint(folder, load_lr_scheduler_states=False)
    return message, second.lr_scheduler.last_epoch


def test_d2_a_checkpoint_without_the_schedule_says_so_and_how_to_go_on(ranks, tmp_path: Path):
    for message, position in ranks(WORLD).run(load_without_schedule, str(tmp_path)):
        assert "this run uses WarmupDecayLR" in message
        assert "load_lr_scheduler_states=False" in message
        assert position == 0


# --- D5, D7: one definition of a step ------------------------------------------------------------------------


def follow(accumulation: int) -> list[float]:
    model_engine = made("JSON", accumulation=accumulation)
    return [model_engine.get_lr()[0], *(lr for lr, _ in rates(model_engine, 11))]


@functools.cache
def alone() -> list[float]:
    return follow(1)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_d5_d7_the_schedule_counts_optimizer_steps_whatever_ranks_and_accumulation(ranks, accumulation):
    for seen in ranks(WORLD).run(follow, accumulation):
        assert seen == pytest.approx(alone())
        assert max(seen) == pytest.approx(LR)
        # DeepSpeed's count: the tenth step is the last with a rate above the end value, what comes after it has that
        assert seen[10] == pytest.approx(LR / 7)
        assert seen[11] == pytest.approx(0.0, abs=1e-9)


def step_it_by_hand(as_wrappers_do: bool) -> str:
    model_engine = made("JSON")
    loss = model_engine(**part(regression_batch(0), dist.get_rank(), WORLD))
    model_engine.backward(loss)
    model_engine.step()
    if as_wrappers_do:
        for _ in range(WORLD):
            model_engine.lr_scheduler.step()
    try:
        run_steps(model_engine, regression_batch, 1, first=1)
    except engine.EngineError as error:
        return str(error)
    return f"{model_engine.get_lr()[0]:.6f}"


def test_d7_a_second_hand_on_the_schedule_is_refused(ranks):
    for message in ranks(WORLD).run(step_it_by_hand, True):
        assert "scheduler" in message
        assert "step()" in message


# --- D6 ------------------------------------------------------------------------------------------------------


def ask_early(kind: str) -> list[float]:
    more = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    arguments, config = KINDS[kind]
    model = seeded(Layers)
    whole = config_of(1, 1, **{**config, **more})
    if not config.get("optimizer"):
        del whole["optimizer"]
    model_engine = engine.initialize(model=model, config=whole, **arguments(model))[0]
    seen = [model_engine.get_lr()[0], model_engine.lr_scheduler.get_last_lr()[0]]
    run_steps(model_engine, regression_batch, 2)
    assert model_engine.skipped_steps == 2
    return [*seen, model_engine.get_lr()[0], model_engine.lr_scheduler.get_last_lr()[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_d6_the_learning_rate_is_known_before_the_first_step_and_after_skips(ranks, kind):
    for seen in ranks(WORLD).run(ask_early, kind):
        assert len(set(seen)) == 1


# --- D9: state in the groups ---------------------------------------------------------------------------------


class CountingAdam(torch.optim.Optimizer):
    """Adam that counts its steps in the parameter group, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(p))
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
                mean = state["exp_avg"] / (1 - 0.9 ** group["step"])
                p.sub_(group["lr"] * mean / ((state["exp_avg_sq"] / (1 - 0.99 ** group["step"])).sqrt() + 1e-3))


def resume_optimizer(stage: int, name: str, folder: str) -> Any:
    def build() -> engine.Engine:
        case = Case(Layers)
        config = config_of(stage, 1, case)
        optimizer = None
        model = case.model()
        if name == "counting":
            del config["optimizer"]
            optimizer = CountingAdam(model.parameters())
        return engine.initialize(model=model, config=config, optimizer=optimizer)[0]

    straight = build()
    run_steps(straight, regression_batch, 10)
    first = build()
    run_steps(first, regression_batch, 5)
    first.save_checkpoint(folder)
    second = build()
    second.load_checkpoint(folder)
    run_steps(second, regression_batch, 5, first=5)
    return pieces_of(straight), pieces_of(second)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["adam", "counting"])
def test_d9_resuming_goes_on_to_the_bit(ranks, stage, name, tmp_path: Path):
    by_rank = ranks(WORLD).run(resume_optimizer, stage, name, str(tmp_path))
    straight, resumed = (assemble([rank[which] for rank in by_rank]) for which in (0, 1))
    for parameter, tensor in straight.items():
        assert torch.equal(resumed[parameter], tensor), parameter


# --- D11 -----------------------------------------------------------------------------------------------------


def schedule_under_scaling() -> int:
    more = {"fp16": {"enabled": True, "initial_scale_power": 8}, "scheduler": {"type": "WarmupLR", "params": {}}}
    model_engine = engine.initialize(model=seeded(Layers), config=config_of(2, 1, optimizer=SGD, **more))[0]
    run_steps(model_engine, regression_batch, 20)
    return model_engine.global_steps


def test_d11_a_schedule_with_fp16_and_stage_2_does_not_hang(ranks):
    assert ranks(WORLD).run(schedule_under_scaling, timeout=60) == [20, 20]
