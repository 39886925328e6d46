"""Loss scaling value by value, skipped steps, hopeless runs, and the settings that change in what dtype sums are taken:
the same at every stage, checked against numbers worked out by hand."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.contracts import RunFailed
from tests.parity.runs import pieces_of
from tests.parity.small import Layers, config_of, regression_batch, seeded
from tests.parity.toy import part

WORLD = 2
STAGES = range(4)
CLEAN, OVERFLOW = ".", "x"


class Poisoned(torch.autograd.Function):
    """The value unchanged, its gradient infinite."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


def digest_of(model_engine: engine.Engine) -> str:
    """Parameters, moments and learning rate: all that a skipped step must leave alone."""
    found = hashlib.sha256(repr(model_engine.get_lr()).encode())
    assert model_engine.optimizer is not None
    for name, _, _, values in pieces_of(model_engine):
        found.update(name.encode() + values.numpy().tobytes())
    for name, state in model_engine.optimizer.named_state().items():
        for key, value in state.items():
            found.update(f"{name} {key} {torch.as_tensor(value).tolist()}".encode())
    return found.hexdigest()


def follow(stage: int, script: str, precision: dict[str, Any], culprit: int = 1) -> dict[str, list[Any]]:
    """One step per character of ``script``; only rank ``culprit`` has the infinite gradient. What each step left."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 8, "warmup_type": "linear"}}
    config = config_of(stage, 2, scheduler=schedule, **precision)
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config)
    seen: dict[str, list[Any]] = {"scale": [], "digest": [], "skipped": [], "overflow": [], "norm": [], "culprit": []}
    for step, kind in enumerate(script):
        for micro in range(2):
            loss = model_engine(**part(regression_batch(step), 2 * micro + model_engine.mesh.dp_rank, 4))
            if kind == OVERFLOW and micro == 0 and model_engine.mesh.rank == culprit:
                loss = Poisoned.apply(loss)
            model_engine.backward(loss)
            model_engine.step()
        assert model_engine.last_report is not None
        assert model_engine.optimizer is not None
        assert model_engine.global_steps == step + 1
        assert model_engine.micro_steps == 2 * (step + 1)
        seen["scale"].append(model_engine.loss_scale)
        seen["digest"].append(digest_of(model_engine))
        seen["skipped"].append(model_engine.skipped_steps)
        seen["overflow"].append(model_engine.optimizer.overflow)
        seen["norm"].append(model_engine.last_report.grad_norm is None)
        seen["culprit"].append(model_engine.last_report.first_nonfinite)
    model_engine.destroy()
    return seen


def dynamic(**keys: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, **keys}}


SEQUENCES = {
    "halves and doubles": (
        "...x....xx.",
        dynamic(),
        [16, 16, 32, 16, 16, 16, 32, 32, 16, 8, 8],
    ),
    "hysteresis 2": (
        "...x....xx.",
        dynamic(hysteresis=2),
        [16, 16, 32, 32, 32, 32, 64, 64, 64, 32, 32],
    ),
    "spent hysteresis stays spent": (
        "x.x.x",
        dynamic(hysteresis=2, loss_scale_window=100),
        [16, 16, 8, 8, 4],
    ),
    "consecutive hysteresis is renewed": (
        "x.x.xx",
        dynamic(hysteresis=2, loss_scale_window=100, consecutive_hysteresis=True),
        [16, 16, 16, 16, 16, 8],
    ),
    "static": ("..x.", {"fp16": {"enabled": True, "loss_scale": 128.0}}, [128] * 4),
    "bf16": ("..x.x", {"bf16": {"enabled": True}}, [1] * 5),
    "fp32": ("..x.x", {}, [1] * 5),
}


def follow_all(stage: int) -> dict[str, dict[str, list[Any]]]:
    return {name: follow(stage, script, precision) for name, (script, precision, _) in SEQUENCES.items()}


@pytest.fixture(scope="module")
def followed(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(follow_all, stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SEQUENCES)
def test_loss_scale_value_by_value(followed, name, stage):
    script, _, scales = SEQUENCES[name]
    for rank in followed(stage):
        assert rank[name]["scale"] == scales
        assert rank[name]["overflow"] == [kind == OVERFLOW for kind in script]
        assert rank[name]["norm"] == [kind == OVERFLOW for kind in script]
        assert rank[name]["skipped"] == [script[: i + 1].count(OVERFLOW) for i in range(len(script))]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SEQUENCES)
def test_skipped_steps_touch_nothing(followed, name, stage):
    script = SEQUENCES[name][0]
    for rank in followed(stage):
        digests = rank[name]["digest"]
        for i in range(1, len(script)):
            assert (digests[i] == digests[i - 1]) == (script[i] == OVERFLOW), f"step {i + 1}"
        for kind, culprit in zip(script, rank[name]["culprit"], strict=True):
            assert (culprit is not None) == (kind == OVERFLOW)


# --- hopeless runs -------------------------------------------------------------------------------------------


def fail(stage: int, script: str, precision: dict[str, Any]) -> str:
    try:
        follow(stage, script, precision)
    except RunFailed as failure:
        return str(failure)
    return "no failure"


def fail_at_once(stage: int) -> str:
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config_of(stage, 1))
    loss = model_engine(**part(regression_batch(0), model_engine.mesh.dp_rank, WORLD))
    model_engine.backward(loss * float("nan") if model_engine.mesh.rank == 1 else loss)
    try:
        model_engine.step()
    except RunFailed as failure:
        return str(failure)
    finally:
        model_engine.destroy()
    return "no failure"


@pytest.mark.parametrize("stage", STAGES)
def test_hopeless_runs_end_alike_on_all_ranks(ranks, stage):
    for messages, words in (
        (ranks(WORLD).run(fail_at_once, stage), ["step 1", "nan", "rank 1"]),
        (ranks(WORLD).run(fail, stage, "." + OVERFLOW * 20, {"bf16": {"enabled": True}}), ["step 21", "20 steps"]),
        (
            ranks(WORLD).run(fail, stage, "xxxx", dynamic(initial_scale_power=2)),
            ["step 3", "smallest loss scale", "fp16.min_loss_scale"],
        ),
    ):
        assert len(set(messages)) == 1
        assert all(word in messages[0] for word in words), messages[0]
