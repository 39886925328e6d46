"""Whole state, read and edited between backward and step, equals that of one plain process at every stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from tests.parity.small import ADAMW, Case, Layers, Regression, config_of, regression_batch, run_steps
from tests.parity.toy import part

WORLD = 2
ACCUMULATION = 2
STAGES = range(4)
FROZEN = "layers.0.weight"


class Awkward(Regression):
    """Parameters of every kind: frozen, tied, 0-dim, unused, empty, of rows that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers().layers
        self.again = nn.Linear(7, 4)
        self.again.weight = self.layers[4].weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.never = nn.Parameter(torch.ones(3, 2))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def predict(self, x: Tensor) -> Tensor:
        hidden = self.layers[:4](x)
        return self.scale * self.layers[4](hidden) + self.again(hidden).tanh()


CASE = Case(Awkward, frozen=(FROZEN,))
TRAINED = [name for name, p in CASE.model().named_parameters() if p.requires_grad and p.numel()]


def parts(step: int, rank: int, size: int) -> list[dict[str, Tensor]]:
    return [part(regression_batch(step), micro * size + rank, size * ACCUMULATION) for micro in range(ACCUMULATION)]


def edit_gradient(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.05, 0.05) + 0.01


@functools.cache
def plain() -> dict[str, Any]:
    """What the engine does below, in one process: read, edit, step."""
    model = CASE.model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    named = dict(model.named_parameters())
    seen: dict[str, Any] = {}
    for step in range(3):
        for index in range(WORLD * ACCUMULATION):
            (model(**part(regression_batch(step), index, WORLD * ACCUMULATION)) / (WORLD * ACCUMULATION)).backward()
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        seen[f"gradients {step}"] = gradients
        if step == 1:
            named["layers.2.weight"].grad.copy_(edit_gradient(gradients["layers.2.weight"]))
            named["scale"].grad.copy_(edit_gradient(gradients["scale"]))
            named["never"].grad = torch.full((3, 2), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        seen[f"parameters {step}"] = {name: p.detach().clone() for name, p in named.items()}
        seen[f"exp_avg {step}"] = {
            n: optimizer.state[p]["exp_avg"].clone() for n, p in named.items() if p in optimizer.state
        }
        if step == 1:
            with torch.no_grad():
                named["layers.4.bias"].add_(0.5)
                named[FROZEN].mul_(0.5)
                optimizer.state[named["layers.3.weight"]]["exp_avg"].fill_(0.125)
    return seen


def read_and_edit(stage: int, more: dict[str, Any]) -> dict[str, Any]:
    model_engine, *_ = engine.initialize(model=CASE.model(), config=config_of(stage, ACCUMULATION, **more))
    seen: dict[str, Any] = {}
    for step in range(3):
        for micro, batch in enumerate(parts(step, dist.get_rank(), WORLD)):
            model_engine.backward(model_engine(**batch))
            if micro == 0:
                model_engine.full_gradient("layers.2.weight")  # a look into an open window changes nothing
            if micro == ACCUMULATION - 1:
                seen[f"gradients {step}"] = model_engine.full_gradients()
                if step == 1:
                    gradients = seen["gradients 1"]
                    edited = {name: edit_gradient(gradients[name]) for name in ("layers.2.weight", "scale")}
                    model_engine.set_full_gradients({**edited, "never": torch.full((3, 2), 0.25)})
            model_engine.step()
        seen[f"parameters {step}"] = model_engine.full_parameters()
        names = TRAINED if step else [name for name in TRAINED if name != "never"]
        seen[f"exp_avg {step}"] = model_engine.full_optimizer_states(names, "exp_avg")
        if step == 1:
            both = model_engine.full_parameters(["layers.4.bias", FROZEN])
            model_engine.set_full_parameters({"layers.4.bias": both["layers.4.bias"] + 0.5, FROZEN: both[FROZEN] * 0.5})
            model_engine.set_full_optimizer_state("layers.3.weight", "exp_avg", torch.full((7,), 0.125))
    seen["count"] = model_engine.full_optimizer_state("scale", "step").item()
    seen["alias"] = model_engine.full_parameter("again.weight")
    model_engine.destroy()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_reading_and_editing_equals_a_plain_loop(ranks, stage):
    expected = plain()
    for seen in ranks(WORLD).run(read_and_edit, stage, {}):
        for key, tensors in expected.items():
            for name, tensor in tensors.items():
                difference = (seen[key][name] - tensor).abs()
                assert (difference <= 1e-6 + 1e-5 * tensor.abs()).all(), f"{key} of {name}: off by {difference.max()}"
        assert not seen["gradients 0"]["never"].any()
        assert seen["count"] == 3
        assert torch.equal(seen["alias"], seen["parameters 2"]["layers.4.weight"])


def test_one_process_needs_no_group():
    model_engine, *_ = engine.initialize(model=CASE.model(), config=config_of(2, 1))
    model_engine.backward(model_engine(**part(regression_batch(0), 0, 1)))
    assert model_engine.full_gradient("scale").shape == ()
    model_engine.step()
    assert model_engine.full_parameters().keys() == dict(model_engine.module.named_parameters()).keys()


# --- in every precision and with every kind of owner ---------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "bf16 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "predivided": {"gradient_predivide_factor": 2.0, "prescale_gradients": True},
    "whole matrices": {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
    "clipped": {"gradient_clipping": 0.05},
}
MATRIX, VECTOR = "layers.0.weight", "layers.4.bias"


def edit_in_each(stage: int, names: list[str], zero_options: dict[str, Any]) -> dict[str, Any]:
    """One step on edited gradients, one more on what came; gradients, norms, and the weights after it."""
    seen: dict[str, Any] = {}
    for name in names:
        case = Case(Layers, zero=zero_options)
        model_engine, *_ = engine.initialize(model=case.model(), config=config_of(stage, 1, case, **VARIANTS[name]))
        size = dist.get_world_size()
        model_engine.backward(model_engine(**part(regression_batch(0), dist.get_rank(), size)))
        gradients = model_engine.full_gradients()
        model_engine.set_full_gradients({MATRIX: gradients[MATRIX] * 0.5 + 0.01, VECTOR: gradients[VECTOR] + 0.25})
        again = model_engine.full_gradients([MATRIX, VECTOR])
        model_engine.step()
        norm = model_engine.get_global_grad_norm()
        run_steps(model_engine, regression_batch, 1, first=1)
        seen[name] = {"gradients": gradients, "again": again, "norm": norm, "after": model_engine.full_parameters()}
        model_engine.destroy()
    return seen


@pytest.fixture(scope="module")
def edited(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(edit_in_each, stage, list(VARIANTS), {}))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", VARIANTS)
def test_edited_gradients_are_what_the_optimizer_gets(edited, name, stage):
    tolerance = 2e-2 if name in ("fp16", "bf16 sums") else 1e-5
    expected = edited(0)[0][name]
    for outcome in (rank[name] for rank in edited(stage)):
        gradients = {**outcome["gradients"], **outcome["again"]}
        torch.testing.assert_close(gradients[MATRIX], outcome["gradients"][MATRIX] * 0.5 + 0.01, rtol=1e-2, atol=1e-3)
        norm = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
        assert outcome["norm"] == pytest.approx(norm, rel=1e-5)
        for key in ("gradients", "after"):
            for parameter, tensor in expected[key].items():
                torch.testing.assert_close(outcome[key][parameter], tensor, rtol=tolerance, atol=tolerance)


def test_groups_of_ranks_hand_out_the_same(ranks):
    names = ["clipped", "whole matrices"]
    expected = ranks(4).run(edit_in_each, 0, names, {})[0]
    for outcome in ranks(4).run(edit_in_each, 3, names, {"mics_shard_size": 2}):
        for name in names:
            assert outcome[name]["norm"] == pytest.approx(expected[name]["norm"], rel=1e-6)
            for parameter, tensor in expected[name]["after"].items():
                torch.testing.assert_close(outcome[name]["after"][parameter], tensor, rtol=0, atol=1e-5)
