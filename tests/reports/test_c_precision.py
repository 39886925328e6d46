"""Loss scaling and precision: what is not finite stays out, is counted, and is said in the words of its dtype."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine.config import EngineError
from tests.parity.small import Case, Layers, config_of, gpt, regression_batch, run_steps, seeded, token_batch
from tests.parity.toy import part
from tests.reports.heard import Log

WORLD = 2
STAGES = range(4)
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 8, "warmup_type": "linear"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
}


def train_poisoned(stage: int, precision: str, value: float, poisoned: tuple[int, ...]) -> dict[str, Any]:
    """Rank 1's gradient of one layer is replaced in some steps."""
    heard = Log()
    config = config_of(stage, 1, scheduler=WARMUP, **PRECISIONS[precision])
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config)
    seen: dict[str, Any] = {"lr": [], "applied": [], "moments": [], "parameters": [], "skipped": []}
    for step in range(4):
        loss = model_engine(**part(regression_batch(step), dist.get_rank(), WORLD))
        handles = []
        if step in poisoned and dist.get_rank() == 1:
            held = next(p for n, p in model_engine.module.named_parameters() if n == "layers.2.weight")
            handles.append(held.register_hook(lambda gradient: torch.full_like(gradient, value)))
        model_engine.backward(loss)
        model_engine.step()
        for handle in handles:
            handle.remove()
        seen["lr"].append(model_engine.get_lr()[0])
        seen["applied"].append(model_engine.was_step_applied())
        seen["skipped"].append(model_engine.skipped_steps)
        names = [n for n, _ in Layers().named_parameters()]
        if any(seen["applied"]):
            seen["moments"].append(model_engine.full_optimizer_states(names, "exp_avg"))
        seen["parameters"].append(model_engine.full_parameters())
    seen["log"] = heard.lines
    logging.getLogger("engine").removeHandler(heard)
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("value", "word"), [(float("inf"), "inf"), (float("nan"), "NaN")])
def test_c4_c5_c6_what_is_not_finite_reaches_nothing_and_is_said(ranks, stage, precision, value, word):
    by_rank = ranks(WORLD).run(train_poisoned, stage, precision, value, (1, 2))
    for seen in by_rank:
        assert seen["applied"] == [True, False, False, True]
        assert seen["skipped"] == [0, 1, 2, 2]
        assert seen["lr"][0] == seen["lr"][1] == seen["lr"][2] < seen["lr"][3]
        for kind in ("moments", "parameters"):
            for name, tensor in seen[kind][0].items():
                assert torch.equal(tensor, seen[kind][2][name]), f"{kind} of {name}"
                assert seen[kind][3][name].isfinite().all()
    skips = [line for line in by_rank[0]["log"] if "skipped" in line]
    assert len(skips) == 2
    assert all(
        line.startswith(f"step {step} skipped: a gradient is {word}") for step, line in zip((2, 3), skips, strict=True)
    )
    assert "layers.2.weight on rank 1" in skips[1]  # the window after a skip is looked into as it comes
    assert any("loss scale" in line for line in skips) == (precision == "fp16")


@pytest.mark.parametrize(("checks", "stays_finite"), [(None, True), (True, True), (False, False)])
def test_c5_only_an_explicit_false_lets_it_through(ranks, checks, stays_finite):
    for is_finite in ranks(WORLD).run(check_or_not, checks):
        assert is_finite == stays_finite


def check_or_not(checks: bool | None) -> bool:
    section = {"enabled": True} | ({} if checks is None else {"check_grad_overflow": checks})
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config_of(2, 1, bf16=section))
    run_steps(model_engine, regression_batch, 1)
    loss = model_engine(**part(regression_batch(1), dist.get_rank(), WORLD))
    if dist.get_rank() == 1:
        held = next(p for n, p in model_engine.module.named_parameters() if n == "layers.2.weight")
        held.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    model_engine.backward(loss)
    model_engine.step()
    return bool(model_engine.full_optimizer_state("layers.2.weight", "exp_avg").isfinite().all())


# --- C2: the search for a scale ------------------------------------------------------------------------------


def search(hysteresis: int) -> tuple[list[float], int, int, list[str]]:
    heard = Log()
    fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": hysteresis, "loss_scale_window": 1000}
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config_of(1, 1, fp16=fp16))
    scales = []
    for step in range(40):
        loss = model_engine(**part(regression_batch(step), dist.get_rank(), WORLD))
        model_engine.backward(loss.float() * 1e2)
        model_engine.step()
        scales.append(model_engine.loss_scale)
    logging.getLogger("engine").removeHandler(heard)
    return scales, model_engine.global_steps, model_engine.skipped_steps, heard.lines


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_c2_the_search_for_a_scale_has_its_own_counter_and_few_lines(ranks, hysteresis):
    scales, steps, skipped, lines = ranks(WORLD).run(search, hysteresis)[0]
    assert steps == 40
    assert 5 < skipped < 40
    halvings = skipped - (hysteresis - 1)
    expected = [2.0**32] * (hysteresis - 1) + [2.0 ** (32 - i) for i in range(1, halvings + 1)]
    assert scales[:skipped] == expected
    assert set(scales[skipped:]) == {expected[-1]}
    assert len([line for line in lines if "skipped" in line]) < skipped
    assert "loss scale" in lines[-1]


# --- C9: every pair of dtypes --------------------------------------------------------------------------------

CELLS = list(itertools.product(PRECISIONS, (None, "fp32", "same"), (1, 2)))


def train_cells(stage: int) -> list[str]:
    outcomes = []
    for precision, accumulate, accumulation in CELLS:
        more: dict[str, Any] = dict(PRECISIONS[precision])
        if accumulate is not None:
            more["data_types"] = {"grad_accum_dtype": precision if accumulate == "same" else "fp32"}
        try:
            model_engine, *_ = engine.initialize(model=seeded(Layers), config=config_of(stage, accumulation, **more))
            losses = run_steps(model_engine, lambda step: regression_batch(0), 4).losses
            outcomes.append("trains" if losses[-1] < losses[0] else f"losses {losses}")
        except EngineError as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("stage", STAGES)
def test_c9_every_pair_of_dtypes_trains(ranks, stage):
    for outcomes in ranks(WORLD).run(train_cells, stage):
        assert dict(zip(CELLS, outcomes, strict=True)) == dict.fromkeys(CELLS, "trains")


# --- C12: fp32 parameters under autocast ---------------------------------------------------------------------


def curve(more: dict[str, Any]) -> list[float]:
    case = Case(lambda: gpt(num_blocks=1), token_batch)
    model_engine, *_ = engine.initialize(model=case.model(), config=config_of(0, 1, **more))
    losses = run_steps(model_engine, lambda step: token_batch(step % 4), 30).losses
    assert model_engine.module.token_embedding.weight.dtype == (torch.bfloat16 if "bf16" in more else torch.float32)
    return losses


def test_c12_autocast_keeps_fp32_parameters_and_follows_fp32():
    full, half = curve({}), curve(PRECISIONS["bf16"])
    autocast = curve({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    assert full[-1] < full[0] - 0.1
    assert autocast == pytest.approx(full, abs=0.02)
    assert half == pytest.approx(full, abs=0.05)
