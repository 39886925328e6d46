"""One seed, one loss: whatever the stage, the secondary partition and the dtype in which the model came."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.parity.small import Case, Regression, config_of, gpt, regression_batch, run_steps, seeded, token_batch

WORLD = 2
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128.0}},
}


class Tied(Regression):
    """One weight, first layer and (transposed) last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, width), nn.Linear(8, width)
        self.out.weight = self.into.weight
        self.last = nn.Linear(width, 4)

    def predict(self, x: Tensor) -> Tensor:
        return self.last(self.into(x).tanh() + self.out(x.flip(-1)).tanh())


TABLE = [(width, precision, accumulation) for width in (4, 36) for precision in PRECISIONS for accumulation in (1, 3)]


def losses_of(stage: int) -> list[list[float]]:
    rows = []
    for width, precision, accumulation in TABLE:
        config = config_of(stage, accumulation, **PRECISIONS[precision])
        model_engine, *_ = engine.initialize(model=seeded(functools.partial(Tied, width)), config=config)
        rows.append(run_steps(model_engine, regression_batch, 4).losses)
        model_engine.destroy()
    return rows


@pytest.fixture(scope="module")
def losses(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(losses_of, stage)[0])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_r1_stages_agree_on_the_losses_of_a_tied_model(losses, stage):
    for row, expected, (width, precision, accumulation) in zip(losses(stage), losses(0), TABLE, strict=True):
        tolerance = 1e-5 if precision == "fp32" else 2e-2
        assert row == pytest.approx(expected, rel=tolerance), (width, precision, accumulation)


def train_partitioned(zero: dict[str, Any]) -> list[float]:
    case = Case(gpt, token_batch, zero={"prefetch_bucket_size": 1, **zero})
    model_engine, *_ = engine.initialize(model=case.model(), config=config_of(3, 1, case))
    return run_steps(model_engine, lambda step: token_batch(step % 2), 12).losses


def test_r3_a_secondary_partition_converges_like_none(ranks):
    with_it = ranks(4).run(train_partitioned, {"zero_hpz_partition_size": 2})
    without = ranks(4).run(train_partitioned, {})
    assert without[0][-1] < without[0][0] - 0.1
    for losses in with_it:
        assert losses == pytest.approx(without[0], abs=1e-5)


def train_16_bit(stage: int, steps: int) -> tuple[float, set[str]]:
    model = gpt(num_blocks=1).to(torch.bfloat16)
    small = {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.0}}
    model_engine, optimizer, *_ = engine.initialize(model=model, config=config_of(stage, 1, optimizer=small))
    before = model_engine.full_parameters()
    run_steps(model_engine, lambda step: token_batch(0), steps)
    after = model_engine.full_parameters()
    moved = torch.cat([(after[name].float() - before[name].float()).abs().flatten() for name in before])
    dtypes = {str(v.dtype) for state in optimizer.named_state().values() for v in state.values()}
    return moved.median().item(), dtypes


@pytest.mark.parametrize("stage", range(4))
def test_r5_a_model_that_came_in_bf16_learns_in_fp32(ranks, stage):
    for moved, dtypes in ranks(WORLD).run(train_16_bit, stage, 50):
        assert moved > 2e-5  # fifty steps of 1e-6 add up, where each alone is lost in bf16
        assert dtypes == {"torch.float32"}
