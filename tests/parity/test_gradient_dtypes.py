"""The settings that change in what dtype gradients are added up, sent and divided, and in what dtype forward computes:
at every stage what a formula says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.contracts import LossSum
from engine.plan import World, plan
from tests.parity.compare import assert_equal_to
from tests.parity.runs import pieces_of
from tests.parity.small import Case, config_of, gpt, run_case, token_batch
from tests.parity.toy import Result, part

WORLD = 2
STAGES = range(4)


class Weighted(nn.Module):
    """Its gradient is what it is given: d (w . c) / d w = c."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, c: Tensor) -> Tensor:
        return (self.w * c).sum()


UNIT_STEP = {"type": "SGD", "params": {"lr": 1.0}}
C = torch.tensor(
    [
        [[1.0, 256.0, 0.1, 1e-3], [1.01, 1.0, 0.2, 1e3]],  # rank 0: micro-batch 0, 1
        [[1.02, 1.0, 0.3, 1.0], [1.03, 0.5, 0.4, 7.0]],  # rank 1
    ]
)
BF16, FP16 = torch.bfloat16, torch.float16


def averaged(coefficients: Tensor, stage: int, more: dict[str, Any], accumulation: int = 2) -> tuple[list[float], bool]:
    """The gradient that arrived at the optimizer (w began at 0, lr is 1), and whether the step was applied."""
    config = config_of(stage, accumulation, optimizer=UNIT_STEP, **more)
    config["train_batch_size"] = WORLD * accumulation
    model_engine, *_ = engine.initialize(model=Weighted(), config=config)
    for micro in range(accumulation):
        model_engine.backward(model_engine(coefficients[model_engine.mesh.rank, micro]).float())
        model_engine.step()
    whole = torch.zeros(4)
    for _, _, start, values in pieces_of(model_engine):
        whole[start : start + values.numel()] = -values
    if stage > 0:
        torch.distributed.all_reduce(whole)
    assert model_engine.last_report is not None
    applied = model_engine.last_report.applied
    model_engine.destroy()
    return whole.tolist(), applied


def averaged_with_all(stage: int) -> dict[str, tuple[list[float], bool]]:
    near_limit = torch.full((WORLD, 1, 4), 6e4)
    found = {name: averaged(C, stage, more) for name, more in SUMS.items()}
    for name, more in NEAR_LIMIT.items():
        found[name] = averaged(near_limit, stage, {"communication_data_type": "fp16", **more}, accumulation=1)
    huge = torch.full((WORLD, 1, 4), 1e25)
    found["huge"] = averaged(huge, stage, {"gradient_clipping": 1.0}, accumulation=1)
    return found


SUMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"gradient_allreduce_op": "sum"},
    "prescaled": {"prescale_gradients": True},
    "predivided": {"gradient_predivide_factor": 4.0},
    "bf16 on the wire": {"communication_data_type": "bf16"},
    "fp16 on the wire": {"communication_data_type": "fp16"},
    "bf16 accumulated": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16 accumulated in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16 accumulated": {
        "fp16": {"enabled": True, "loss_scale": 4.0},
        "data_types": {"grad_accum_dtype": "fp16"},
    },
}
NEAR_LIMIT: dict[str, dict[str, Any]] = {
    "overflows on the wire": {},
    "prescaling keeps it finite": {"prescale_gradients": True},
    "predividing keeps it finite": {"gradient_predivide_factor": 4.0},
}


def oracle(name: str, stage: int) -> Tensor:
    """What docs/how_a_step_works.md says: stages 0 and 1 reduce a window's sum, 2 and 3 every micro-batch."""
    halves = C / 2
    if name in ("plain", "prescaled", "predivided"):
        return halves.sum(dim=(0, 1)) / WORLD
    if name == "sum":
        return halves.sum(dim=(0, 1))
    if name.endswith("on the wire"):
        dtype = BF16 if name.startswith("bf16") else FP16
        travelling = halves.sum(dim=1, keepdim=True) if stage < 2 else halves
        by_round = travelling.to(dtype)
        return (by_round[0] + by_round[1]).float().sum(dim=0) / WORLD
    dtype = FP16 if name.startswith("fp16") else BF16
    scale = 4.0 if dtype == FP16 else 1.0
    local = (C.to(dtype).float() * scale / 2).to(dtype)
    if name.endswith("in fp32") or stage == 3:
        return local.float().sum(dim=(0, 1)) / WORLD / scale
    if stage < 2:
        window = local[:, 0] + local[:, 1]
        return (window[0].float() + window[1].float()).to(dtype).float() / WORLD / scale
    rounds = (local[0].float() + local[1].float()).to(dtype)
    return (rounds[0] + rounds[1]).float() / WORLD / scale


@pytest.fixture(scope="module")
def gradients(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(averaged_with_all, stage)[0])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SUMS)
def test_sums_follow_the_formula(gradients, name, stage):
    found, applied = gradients(stage)[name]
    assert applied
    assert found == pytest.approx(oracle(name, stage).tolist(), rel=1e-6)


def test_the_oracle_tells_settings_apart():
    for stage in STAGES:
        exact = oracle("plain", stage)
        for name in ("sum", "bf16 on the wire", "fp16 on the wire", "bf16 accumulated", "bf16 accumulated in fp32"):
            assert not torch.allclose(oracle(name, stage), exact, rtol=1e-4), (name, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NEAR_LIMIT)
def test_dividing_first_keeps_fp16_sums_finite(gradients, name, stage):
    found, applied = gradients(stage)[name]
    assert applied == ("keeps" in name)
    assert found == pytest.approx([6e4 if applied else 0.0] * 4, rel=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_huge_gradient_is_finite(gradients, stage):
    found, applied = gradients(stage)["huge"]
    assert applied
    assert found == pytest.approx([0.5] * 4, rel=1e-5)  # clipped to norm 1


def test_accumulation_in_16_bit_is_noted_where_it_has_no_effect():
    more = SUMS["bf16 accumulated"]
    for stage in STAGES:
        notes = plan(load_config(config_of(stage, 1, **more)), World(size=WORLD)).notes
        told = [note for note in notes if note.path == "data_types.grad_accum_dtype" and "no effect" in note.message]
        assert bool(told) == (stage == 3)


# --- exact means and divided gradients together --------------------------------------------------------------


def weigh_tokens(stage: int, more: dict[str, Any]) -> list[float]:
    config = config_of(stage, 2, optimizer=UNIT_STEP, **more)
    config["train_batch_size"] = WORLD * 2
    model_engine, *_ = engine.initialize(model=Weighted(), config=config)
    for micro in range(2):
        total = model_engine(C[model_engine.mesh.rank, micro])
        model_engine.backward(LossSum(total, 1.0 + model_engine.mesh.rank + 2 * micro))
        model_engine.step()
    whole = torch.zeros(4)
    for _, _, start, values in pieces_of(model_engine):
        whole[start : start + values.numel()] = -values
    if stage > 0:
        torch.distributed.all_reduce(whole)
    model_engine.destroy()
    return whole.tolist()


@pytest.mark.parametrize("more", [{}, {"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}])
@pytest.mark.parametrize("stage", STAGES)
def test_loss_sums_divide_by_the_count_alone(ranks, stage, more):
    for found in ranks(WORLD).run(weigh_tokens, stage, more):
        assert found == pytest.approx((C.sum(dim=(0, 1)) / (1 + 2 + 3 + 4)).tolist(), rel=1e-6)


# --- autocast and casts --------------------------------------------------------------------------------------

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
SGD = {"type": "SGD", "params": {"lr": 0.05}}


@functools.cache
def autocast_reference() -> Result:
    model, result = gpt(), Result()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        losses = []
        for index in range(WORLD):
            with torch.autocast("cpu", BF16):
                loss = model(**part(token_batch(step), index, WORLD))
            (loss / WORLD).backward()
            losses.append(loss.item())
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(sum(losses) / WORLD)
        result.norms.append(gradients.norm().item())
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def train_under_autocast(stage: int) -> Any:
    case = Case(gpt, token_batch)
    return run_case(case, config_of(stage, 1, optimizer=SGD, **AUTOCAST), steps=3)


@pytest.mark.parametrize("stage", STAGES)
def test_autocast(ranks, stage):
    assert_equal_to(
        autocast_reference(), ranks(WORLD).run(train_under_autocast, stage), losses=1e-4, parameters=1e-4, norms=1e-3
    )


class Nested(nn.Module):
    """Notes the dtypes of what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: dict[str, Any], *, mask: Tensor, ids: Tensor) -> Tensor:
        features, (deep, label) = inputs["features"], inputs["deep"]
        self.seen = [features.dtype, deep["x"].dtype, label.dtype, mask.dtype, ids.dtype]
        return self.layer(features + deep["x"]).float().square().mean()


def dtypes_seen(stage: int, precision: str | None) -> list[str]:
    more = {precision: {"enabled": True}} if precision else {}
    model_engine, *_ = engine.initialize(model=Nested(), config=config_of(stage, 1, **more))
    x = torch.ones(3, 2)
    inputs = {"features": x, "deep": ({"x": x}, torch.tensor([1, 2], dtype=torch.int32))}
    loss = model_engine(inputs, mask=torch.tensor([True]), ids=torch.tensor([7]))
    model_engine.backward(loss)
    model_engine.step()
    seen = [str(dtype).removeprefix("torch.") for dtype in model_engine.module.seen]
    model_engine.destroy()
    return seen


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("precision", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), (None, "float32")])
def test_inputs_are_cast_alike(ranks, stage, precision, name):
    for seen in ranks(WORLD).run(dtypes_seen, stage, precision):
        assert seen == [name, name, "int32", "bool", "int64"]
