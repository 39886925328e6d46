"""Every way to write a training step gives the numbers of the plain loop, and what cannot is refused."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.contracts import LossSum
from tests.parity.compare import assert_equal_to
from tests.parity.runs import Pieces, assemble, pieces_of
from tests.parity.small import Case, Layers, config_of, plain_loop, regression_batch, run_steps, seeded
from tests.parity.toy import Result, part

WORLD = 2
ACCUMULATION = 2
STEPS = 3
STAGES = range(4)
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
CASE = Case(Layers)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@functools.cache
def reference() -> Result:
    return plain_loop(CASE, WORLD * ACCUMULATION, STEPS, make_optimizer)


def micro_batches(model_engine: engine.Engine, step: int) -> Iterator[dict[str, Tensor]]:
    rank, size = model_engine.mesh.dp_rank, model_engine.mesh.dp_size
    for micro in range(ACCUMULATION):
        yield part(regression_batch(step), micro * size + rank, size * ACCUMULATION)


# --- ways to write a step: each runs one window --------------------------------------------------------------


def forward_backward_step(model_engine: engine.Engine, step: int) -> None:
    for batch in micro_batches(model_engine, step):
        model_engine.backward(model_engine(**batch))
        model_engine.step()


def train_batch(model_engine: engine.Engine, step: int) -> None:
    loss = model_engine.train_batch(micro_batches(model_engine, step))
    assert model_engine.last_report is not None
    assert loss.item() == pytest.approx(model_engine.last_report.loss)


def no_sync(model_engine: engine.Engine, step: int) -> None:
    for micro, batch in enumerate(micro_batches(model_engine, step)):
        with model_engine.no_sync() if micro == 0 else contextlib.nullcontext():
            model_engine.backward(model_engine(**batch))
        model_engine.step()


def no_sync_around_all(model_engine: engine.Engine, step: int) -> None:
    for batch in micro_batches(model_engine, step):
        with model_engine.no_sync():
            model_engine.backward(model_engine(**batch))
        model_engine.step()


def boundary_by_hand(model_engine: engine.Engine, step: int) -> None:
    for micro, batch in enumerate(micro_batches(model_engine, step)):
        model_engine.set_gradient_accumulation_boundary(micro == ACCUMULATION - 1)
        model_engine.backward(model_engine(**batch))
        model_engine.step()


def two_losses(model_engine: engine.Engine, step: int) -> None:
    for batch in micro_batches(model_engine, step):
        loss = model_engine(**batch)
        model_engine.backward(0.3 * loss, retain_graph=True)
        model_engine.backward(0.7 * loss)
        model_engine.step()


def plain_backward(model_engine: engine.Engine, step: int) -> None:
    for batch in micro_batches(model_engine, step):
        (model_engine(**batch) / ACCUMULATION).backward()
        model_engine.step()


def unmanaged(model_engine: engine.Engine, step: int) -> None:
    for batch in micro_batches(model_engine, step):
        model_engine.backward(model_engine(**batch) / ACCUMULATION)
    model_engine.step()


def evaluate_between(model_engine: engine.Engine, step: int) -> None:
    for batch in micro_batches(model_engine, step):
        model_engine.eval_batch(micro_batches(model_engine, step + 7))
        model_engine.backward(model_engine(**batch))
        model_engine.step()


def zero_grad_after(model_engine: engine.Engine, step: int) -> None:
    forward_backward_step(model_engine, step)
    assert model_engine.optimizer is not None
    model_engine.optimizer.zero_grad()
    model_engine.zero_grad()


def zero_grad_before_each_backward(model_engine: engine.Engine, step: int) -> None:
    """The habit of plain loops: inside an engine it must not drop what accumulates."""
    assert model_engine.optimizer is not None
    for batch in micro_batches(model_engine, step):
        model_engine.optimizer.zero_grad()
        model_engine.backward(model_engine(**batch))
        model_engine.step()


def discard_first(model_engine: engine.Engine, step: int) -> None:
    strange = next(micro_batches(model_engine, 50))
    model_engine.backward(model_engine(**strange))
    model_engine.step()
    model_engine.flush(discard=True)
    forward_backward_step(model_engine, step)


WAYS: dict[str, tuple[Callable[[engine.Engine, int], None], dict[str, Any]]] = {
    way.__name__: (way, {})
    for way in (
        forward_backward_step,
        train_batch,
        no_sync,
        no_sync_around_all,
        boundary_by_hand,
        two_losses,
        plain_backward,
        evaluate_between,
        zero_grad_after,
        zero_grad_before_each_backward,
        discard_first,
    )
}
WAYS["unmanaged"] = (unmanaged, {"managed_gradient_accumulation": False})
WITHOUT_LOSS = ("plain_backward",)
"""The engine never sees these losses."""
OTHER_LOSS = ("unmanaged",)
"""The user has divided these by the number of micro-batches."""


def run_all_ways(stage: int) -> dict[str, tuple[Result, Pieces, dict[str, Any]]]:
    outcomes: dict[str, tuple[Result, Pieces, dict[str, Any]]] = {}
    for name, (way, more) in WAYS.items():
        config = config_of(stage, ACCUMULATION, optimizer=SGD, **more)
        model_engine, *_ = engine.initialize(model=CASE.model(), config=config)
        result = Result()
        for step in range(STEPS):
            way(model_engine, step)
            report = model_engine.last_report
            assert report is not None
            assert report.step == step + 1
            assert report.samples == 12 * (step + 1), name
            if name in WITHOUT_LOSS:
                assert report.loss is None
            else:
                assert report.loss is not None
                result.losses.append(report.loss * (ACCUMULATION if name in OTHER_LOSS else 1))
            assert report.grad_norm is not None
            result.norms.append(report.grad_norm)
        outcomes[name] = result, pieces_of(model_engine), {}
        model_engine.destroy()
    return outcomes


@pytest.fixture(scope="module")
def all_ways(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(run_all_ways, stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", WAYS)
def test_way_to_step(all_ways, name, stage):
    expected = reference()
    if name in WITHOUT_LOSS:
        expected = Result([], expected.norms, expected.parameters)
    assert_equal_to(expected, [rank[name] for rank in all_ways(stage)])


# --- exact means ---------------------------------------------------------------------------------------------


def mask_of(step: int) -> Tensor:
    """Very uneven: the last micro-batch of the last rank keeps nothing at all."""
    keep = torch.rand(12, 4, generator=torch.Generator().manual_seed(step)) < torch.linspace(1.0, 0.1, 12)[:, None]
    keep[9:] = False
    return keep.float()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layers()

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> LossSum:
        errors = (self.inner.predict(x) - y).square() * mask
        return LossSum(errors.sum(), mask.sum())


def masked_batch(step: int) -> dict[str, Tensor]:
    return {**regression_batch(step), "mask": mask_of(step)}


@functools.cache
def masked_reference() -> Result:
    model, result = seeded(Masked), Result()
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        sums = model(**masked_batch(step))
        loss = sums.total / sums.count
        loss.backward()
        result.losses.append(loss.item())
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        result.norms.append(gradients.norm().item())
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def train_masked(stage: int) -> tuple[Result, Pieces, dict[str, Any]]:
    config = config_of(stage, ACCUMULATION, optimizer=SGD)
    model_engine, *_ = engine.initialize(model=seeded(Masked), config=config)
    outcome = run_steps(model_engine, masked_batch, STEPS), pieces_of(model_engine), {}
    model_engine.destroy()
    return outcome


@pytest.mark.parametrize("stage", STAGES)
def test_loss_sum_is_the_mean_over_everything(ranks, stage):
    assert_equal_to(masked_reference(), ranks(WORLD).run(train_masked, stage), norms=1e-5)


# --- losses outside the model --------------------------------------------------------------------------------


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers().layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train_with_loss_fn(stage: int) -> tuple[Result, Pieces, dict[str, Any]]:
    config = config_of(stage, ACCUMULATION, optimizer=SGD)
    model_engine, *_ = engine.initialize(model=seeded(Predictor), config=config, loss_fn=nn.functional.mse_loss)
    result = Result()
    for step in range(STEPS):
        pairs = ((batch["x"], batch["y"]) for batch in micro_batches(model_engine, step))
        result.losses.append(model_engine.train_batch(pairs).item())
        result.norms.append(model_engine.get_global_grad_norm() or 0.0)
    outcome = result, pieces_of(model_engine), {}
    model_engine.destroy()
    return outcome


def train_two_engines(stage: int) -> tuple[Result, Pieces, dict[str, Any]]:
    """One loss through two engines: the first one's backward gives the second its gradients."""
    whole = seeded(Predictor).layers
    config = config_of(stage, ACCUMULATION, optimizer=SGD)
    first, *_ = engine.initialize(model=whole[:2], config=config)
    second, *_ = engine.initialize(model=whole[2:], config=config)
    result = Result()
    for step in range(STEPS):
        for batch in micro_batches(first, step):
            first.backward(nn.functional.mse_loss(second(first(batch["x"])), batch["y"]))
            first.step()
            second.step()
        assert first.last_report is not None
        assert second.last_report is not None
        assert second.last_report.loss is None
        result.losses.append(first.last_report.loss or 0.0)
        both = [first.get_global_grad_norm() or 0.0, second.get_global_grad_norm() or 0.0]
        result.norms.append(math.hypot(*both))
    pieces = [(f"layers.{name}", *rest) for name, *rest in (*pieces_of(first), *pieces_of(second))]
    first.destroy()
    second.destroy()
    assert dist.is_initialized()  # the group was there before
    return result, pieces, {}  # type: ignore[return-value]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", [train_with_loss_fn, train_two_engines])
def test_loss_outside_the_model(ranks, how, stage):
    assert_equal_to(reference(), ranks(WORLD).run(how, stage))


# --- windows that end early ----------------------------------------------------------------------------------


def close_early(stage: int) -> tuple[Pieces, list[Any], list[Any]]:
    config = config_of(stage, ACCUMULATION, optimizer=SGD)
    model_engine, *_ = engine.initialize(model=CASE.model(), config=config)
    model_engine.flush()
    batch = next(micro_batches(model_engine, 0))
    model_engine.backward(model_engine(**batch))
    model_engine.step()
    before = model_engine.global_steps
    model_engine.flush()
    assert model_engine.last_report is not None
    counters = [before, model_engine.global_steps, model_engine.micro_steps, model_engine.global_samples]
    outcome = pieces_of(model_engine), [model_engine.last_report.loss, model_engine.last_report.grad_norm], counters
    model_engine.destroy()
    return outcome


@pytest.mark.parametrize("stage", STAGES)
def test_flush_takes_the_mean_of_what_came(ranks, stage):
    by_rank = ranks(WORLD).run(close_early, stage)
    model = CASE.model()
    optimizer = make_optimizer(model.parameters())
    loss = sum(model(**part(regression_batch(0), index, WORLD * ACCUMULATION)) for index in range(WORLD)) / WORLD
    loss.backward()
    optimizer.step()
    whole = assemble([pieces for pieces, _, _ in by_rank])
    for name, p in model.named_parameters():
        assert torch.allclose(whole[name], p, atol=1e-6)
    for _, (reported, _), counters in by_rank:
        assert reported == pytest.approx(loss.item())
        assert counters == [0, 1, ACCUMULATION, WORLD * 3]
