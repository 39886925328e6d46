"""Layer drop on one process: gates, scaling, evaluation, recomputation, and models that drop layers themselves."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engine
from engine.contracts import Place, SavedWork
from engine.model.layer_drop import LayerDrop
from engine.plan import LayerDropPlan
from engine.plan.layer_drop import keep_probability, theta_at, theta_in
from tests.parity.runs import config_of
from tests.parity.test_precision import Poisoned
from tests.parity.toy import toy_batch, toy_model
from tests.unit.model.stacks import SECTION, SMALL, Residual, Stack, gates_at, seeded, start

__all__ = ["seeded"]
PLAN = LayerDropPlan(0.3, 0.7)


# --- formulas ------------------------------------------------------------------------------------------------------


def test_published_values() -> None:
    assert [round(theta_at(t, 0.5, 0.001), 6) for t in (0, 100, 1000, 5000)] == [1.0, 0.952419, 0.68394, 0.503369]
    assert sum(keep_probability(layer, 12, 0.5) for layer in range(1, 13)) == pytest.approx(8.75)
    assert sum(keep_probability(layer - 1, 12, 0.5) for layer in range(1, 13)) == pytest.approx(9.25)
    assert [keep_probability(layer, 4, 0.5) for layer in (1, 2, 3, 4)] == [0.875, 0.75, 0.625, 0.5]


def test_what_theta_counts() -> None:
    assert theta_in(PLAN, 3, 5) == theta_at(3, 0.3, 0.7)
    theirs = LayerDropPlan(0.3, 0.7, deepspeed=True)
    assert [theta_in(theirs, 0, steps) for steps in (0, 1, 2, 5)] == [theta_at(t, 0.3, 0.7) for t in (0, 0, 1, 4)]


def drawing(plan: LayerDropPlan, num_layers: int, seed: int = 0) -> tuple[LayerDrop, list[int]]:
    step = [0]
    saved = SavedWork(place=lambda: Place(step[0], 10**6, step[0] % 3))
    return LayerDrop(plan, seed, [nn.Identity() for _ in range(num_layers)], saved), step


@pytest.mark.parametrize("compat", [False, True])
def test_layers_are_kept_as_often_as_they_should_be(compat: bool) -> None:
    drop, step = drawing(LayerDropPlan(0.5, 1.0, compat), 12)
    counts, draws = [0] * 12, 10_000
    for step[0] in range(1000, 1000 + draws):
        for layer, kept in enumerate(drop.draw().kept):
            counts[layer] += kept
    for layer, count in enumerate(counts, 1):
        p = 1 - (layer - compat) / 12 * 0.5
        assert abs(count - draws * p) <= 3 * math.sqrt(draws * p * (1 - p)), f"layer {layer}"


def test_gates_depend_on_the_place_alone() -> None:
    one, step = drawing(PLAN, 8)
    other, other_step = drawing(PLAN, 8)
    for other_step[0] in range(5):
        other.draw()
    step[0] = other_step[0] = 7
    assert one.draw() == other.draw()
    assert [drawing(PLAN, 8, seed)[0].draw().kept for seed in range(20)] != [one.draw().kept] * 20


@pytest.mark.usefixtures("seeded")
def test_the_mean_is_the_plain_output() -> None:
    """Linear residual blocks: the mean over gates of a whole stack is the stack without gates."""
    model = Stack([nn.Sequential() for _ in range(3)])
    for layer in model.layers:
        layer.linear = nn.Linear(8, 8, bias=False)
        layer.forward = lambda x, layer=layer: x + 0.3 * layer.linear(x)
    x, seen = torch.randn(2, 3, 8), []
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))  # type: ignore[method-assign]
    plain = model(x)
    step = [0]
    saved = SavedWork(place=lambda: Place(step[0], 10**6, 0))
    drop = LayerDrop(LayerDropPlan(0.5, 1.0), 0, list(model.layers), saved)
    drop.install(model)
    for step[0] in range(1500):
        seen.append(model(x).detach())
    outputs = torch.stack(seen)
    error = outputs.std(dim=0) / math.sqrt(len(seen))
    off = ((outputs.mean(dim=0) - plain).abs() / error).flatten()
    assert off.max() < 4.5  # the largest of 48, none of them far out
    assert (off < 3).float().mean() > 0.9
    assert (outputs.std(dim=0) > 0).all()
    drop.close()
    assert torch.equal(model(x), plain)


# --- a training forward --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("seeded")
def test_layers_left_out_are_not_computed_and_get_no_gradient() -> None:
    model = Stack([Residual() for _ in range(4)])
    model_engine = start(model)
    x = torch.randn(4, 3, 8)
    for step in range(8):
        before = [layer.calls for layer in model.layers]  # type: ignore[union-attr]
        kept = gates_at(step, 0, theta_at(step, 0.3, 0.7))
        assert model_engine.get_pld_theta() == theta_at(step, 0.3, 0.7)
        model_engine.backward(model_engine(x))
        assert [layer.calls - count for layer, count in zip(model.layers, before, strict=True)] == kept  # type: ignore[union-attr]
        gradients = [model_engine.full_gradients()[f"layers.{index}.linear.weight"] for index in range(4)]
        assert [gradient is not None and bool(gradient.any()) for gradient in gradients] == kept
        model_engine.step()
    assert model_engine.layers_skipped == sum(
        gates_at(step, 0, theta_at(step, 0.3, 0.7)).count(False) for step in range(8)
    )
    model_engine.destroy()


@pytest.mark.usefixtures("seeded")
def test_evaluation_runs_all_layers() -> None:
    model = Stack([Residual() for _ in range(4)])
    plain = Stack([Residual() for _ in range(4)])
    plain.load_state_dict(model.state_dict())
    model_engine = start(model)
    model_engine.global_steps = 1000
    x = torch.randn(4, 3, 8)
    with torch.no_grad():
        assert torch.equal(model_engine(x), plain(x))  # no gradient asked for: no training forward
    model_engine.eval()
    assert torch.equal(model_engine(x), plain(x))
    assert float(model_engine.eval_batch(iter([(x,)]), 1)) == pytest.approx(plain(x).item())
    model_engine.train()
    for layer in model.layers:
        layer.eval()  # blocks that were put to rest
    assert torch.equal(model_engine(x), plain(x))
    assert model_engine.roles.saved_work.layers_skipped == 0
    model_engine.destroy()


def test_destroy_gives_the_model_its_own_forwards_back() -> None:
    model = toy_model(**SMALL)
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage=0, **SECTION))
    assert "forward" in vars(model)
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "labels", "position_ids"]
    model_engine.destroy()
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.usefixtures("seeded")
def test_a_copy_of_the_model_is_its_own() -> None:
    """As for a moving average of the weights."""
    model = Stack([Residual() for _ in range(4)])
    model_engine = start(model)
    model_engine.global_steps = 1000
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 8)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(twin(x), x.square().mean())  # its own weights, and no gates
    assert [layer.calls for layer in twin.layers] == [1] * 4  # type: ignore[union-attr]
    model_engine.destroy()


def test_theta_follows_applied_steps_and_is_told(tmp_path: Path) -> None:
    config = config_of(stage=0, **SECTION, csv_monitor={"enabled": True, "output_path": "csv", "job_name": "job"})
    model_engine, *_ = engine.initialize(model=toy_model(**SMALL), config=config, output=tmp_path)
    thetas = []
    for step in range(4):
        loss = model_engine(**toy_batch(step))
        model_engine.backward(Poisoned.apply(loss) if step == 1 else loss)
        model_engine.step()
        assert model_engine.last_report is not None
        thetas.append(model_engine.last_report.scalars["Train/pld_theta"])
    assert thetas == [theta_at(t, 0.3, 0.7) for t in (0, 1, 1, 2)]
    assert model_engine.get_pld_theta() == theta_at(3, 0.3, 0.7)
    drop = model_engine.progressive_layer_drop
    assert drop is not None
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": theta_at(3, 0.3, 0.7)}
    model_engine.destroy()
    (file,) = tmp_path.rglob("*pld_theta*.csv")
    assert [float(line.split(",")[1]) for line in file.read_text().splitlines()[1:]] == pytest.approx(thetas)


def test_without_the_section_there_is_no_theta() -> None:
    model_engine, *_ = engine.initialize(model=toy_model(**SMALL), config=config_of(stage=0))
    assert model_engine.progressive_layer_drop is None
    assert model_engine.get_pld_theta() is None
    model_engine.destroy()


# --- a model that drops layers itself ------------------------------------------------------------------------------


class TakesTheta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        self.seen.append((progressive_layer_drop, pld_theta))
        return self.linear(x).mean()


def test_a_model_that_takes_theta_is_handed_it(caplog: pytest.LogCaptureFixture) -> None:
    model = TakesTheta()
    with caplog.at_level(logging.WARNING, logger="engine"):
        model_engine = start(model)
    assert "TakesTheta.forward takes pld_theta" in caplog.text
    for _ in range(3):
        model_engine.backward(model_engine(torch.ones(4, 8)))
        model_engine.step()
    model_engine.eval()
    model_engine(torch.ones(4, 8))
    assert model.seen == [*((True, theta_at(t, 0.3, 0.7)) for t in range(3)), (False, 1.0)]
    model_engine.destroy()
    theirs = TakesTheta()
    model_engine = start(theirs, progressive_layer_drop={**SECTION["progressive_layer_drop"], "compat": "deepspeed"})
    for _ in range(3):
        model_engine.backward(model_engine(torch.ones(4, 8)))
        model_engine.step()
    assert [theta for _, theta in theirs.seen] == [theta_at(t, 0.3, 0.7) for t in (0, 0, 1)]
    model_engine.destroy()


# --- recomputation -------------------------------------------------------------------------------------------------


def recomputes(use_reentrant: bool, by: int) -> Callable[[Any, Tensor], Tensor]:
    """A forward of `Stack` that keeps the inputs of every ``by`` layers only."""

    def forward(self: Stack, x: Tensor) -> Tensor:
        def some(x: Tensor, first: int) -> Tensor:
            for layer in self.layers[first : first + by]:
                x = layer(x)
            return x

        for first in range(0, len(self.layers), by):
            x = checkpoint(some, x, first, use_reentrant=use_reentrant)  # type: ignore[assignment]
        return x.square().mean()

    return forward


def train_stack(forward: Any, joint: bool) -> tuple[list[Tensor], int]:
    """Parameters after 5 steps of 2 micro-batches and layers skipped. ``joint``: one backward for both."""
    torch.manual_seed(0)
    model = Stack([Residual() for _ in range(4)])
    if forward is not None:
        model.forward = forward.__get__(model)  # type: ignore[method-assign]
    model_engine = start(model, gradient_accumulation_steps=1 if joint else 2, train_batch_size=4)
    for step in range(5):
        x = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if joint:
            first, second = model_engine(x[0]), model_engine(x[1])
            model_engine.backward((first + second) / 2)
            model_engine.step()
        else:
            for half in x:
                model_engine.backward(model_engine(half))
                model_engine.step()
    skipped = model_engine.layers_skipped
    model_engine.destroy()
    return [p.detach().clone() for p in model.parameters()], skipped


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("by", [1, 2])
@pytest.mark.usefixtures("seeded")
def test_activations_are_computed_again_with_the_same_gates(joint: bool, use_reentrant: bool, by: int) -> None:
    plain, skipped = train_stack(None, joint)
    again, skipped_again = train_stack(recomputes(use_reentrant, by), joint)
    assert skipped == skipped_again > 0
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
