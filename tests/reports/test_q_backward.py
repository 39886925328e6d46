"""Backward in every spelling, several engines in one graph, and what cannot be right refused in one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.contracts import EngineError
from tests.parity.small import Case, config_of, regression_batch, seeded
from tests.parity.toy import part

WORLD = 2
STAGES = range(4)
ACCUMULATION = 2
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 64.0}}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, y: Tensor) -> Tensor:
        return self.last(self.first(y).tanh()).sigmoid()


def made(make: type[nn.Module], stage: int, accumulation: int = 1, **more: Any) -> engine.Engine:
    case = Case(make, zero={"prefetch_bucket_size": 1} if stage == 3 else {})
    config = config_of(stage, accumulation, case, optimizer=SGD, **more)
    return engine.initialize(model=seeded(make), config=config)[0]


def batch_of(step: int, index: int, num_parts: int) -> tuple[Tensor, Tensor]:
    batch = part(regression_batch(step), index, num_parts)
    return batch["x"], batch["y"]


def assert_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    for parameters in found:
        for name, tensor in expected.items():
            difference = (parameters[name] - tensor).abs().max().item()
            assert difference <= tolerance, f"{name} is off by {difference:.1e}"


def named(model: nn.Module, beginning: str = "") -> dict[str, Tensor]:
    return {beginning + name: p.detach().clone() for name, p in model.named_parameters()}


# --- Q1: one loss through two engines ------------------------------------------------------------------------


def adversaries(stage: int, more: dict[str, Any]) -> dict[str, Tensor]:
    """The judge steps on both kinds, then the maker on the judge's verdict; the judge drops what that brought it."""
    maker, judge = made(Predictor, stage, **more), made(Judge, stage, **more)
    for step in range(3):
        x, y = batch_of(step, dist.get_rank(), WORLD)
        false = maker(x)
        judge.backward((1 - judge(y)).mean() + judge(false.detach()).mean())
        judge.step()
        maker.backward((1 - judge(false)).mean())
        maker.step()
        judge.zero_grad()
    parameters = {f"maker.{n}": p for n, p in maker.full_parameters().items()}
    return parameters | {f"judge.{n}": p for n, p in judge.full_parameters().items()}


@functools.cache
def plain_adversaries() -> dict[str, Tensor]:
    maker, judge = seeded(Predictor), seeded(Judge)
    maker_optimizer, judge_optimizer = sgd(maker), sgd(judge)
    for step in range(3):
        pairs = [batch_of(step, index, WORLD) for index in range(WORLD)]
        for x, y in pairs:
            (((1 - judge(y)).mean() + judge(maker(x).detach()).mean()) / WORLD).backward()
        judge_optimizer.step()
        for x, _ in pairs:
            ((1 - judge(maker(x))).mean() / WORLD).backward()
        maker_optimizer.step()
        maker_optimizer.zero_grad()
        judge_optimizer.zero_grad()
    return named(maker, "maker.") | named(judge, "judge.")


def distillation(stage: int, more: dict[str, Any]) -> dict[str, Tensor]:
    """Both learn from one loss, summed over two micro-batches; the student calls backward, both step."""
    student, teacher = made(Predictor, stage, ACCUMULATION, **more), made(Predictor, stage, ACCUMULATION, **more)
    for step in range(3):
        for micro in range(ACCUMULATION):
            x, y = batch_of(step, micro * WORLD + dist.get_rank(), WORLD * ACCUMULATION)
            guess, guide = student(x), teacher(2 * x)
            student.backward((guess - guide).square().mean() + (guide - y.to(guide.dtype)).square().mean())
            student.step()
            teacher.step()
    parameters = {f"student.{n}": p for n, p in student.full_parameters().items()}
    return parameters | {f"teacher.{n}": p for n, p in teacher.full_parameters().items()}


@functools.cache
def plain_distillation() -> dict[str, Tensor]:
    student, teacher = seeded(Predictor), seeded(Predictor)
    both = sgd(student), sgd(teacher)
    for step in range(3):
        for index in range(WORLD * ACCUMULATION):
            x, y = batch_of(step, index, WORLD * ACCUMULATION)
            guess, guide = student(x), teacher(2 * x)
            loss = (guess - guide).square().mean() + (guide - y).square().mean()
            (loss / (WORLD * ACCUMULATION)).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return named(student, "student.") | named(teacher, "teacher.")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("run", "plain"), [(adversaries, plain_adversaries), (distillation, plain_distillation)])
def test_q1_two_engines_in_one_graph(ranks, run, plain, stage):
    assert_same(ranks(WORLD).run(run, stage, {}), plain())


@pytest.mark.parametrize("stage", STAGES)
def test_q1_two_engines_with_one_loss_scale(ranks, stage):
    assert_same(ranks(WORLD).run(distillation, stage, STATIC), plain_distillation(), tolerance=5e-3)


def share_a_loss_with_other_scales(stage: int) -> str:
    first = made(Predictor, stage, **STATIC)
    second = made(Judge, stage, fp16={"enabled": True, "loss_scale": 128.0})
    x, _ = batch_of(0, dist.get_rank(), WORLD)
    first.backward(second(first(x)).mean())
    first.step()
    try:
        second.step()
    except EngineError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("stage", STAGES)
def test_q1_two_engines_with_two_loss_scales_are_refused(ranks, stage):
    for message in ranks(WORLD).run(share_a_loss_with_other_scales, stage):
        assert "another engine, with another loss scale than 128" in message


# --- Q2 ------------------------------------------------------------------------------------------------------


def initialize_twice() -> tuple[float, float]:
    first, second = made(Predictor, 1), made(Predictor, 3)
    losses = []
    for model_engine in (first, second):
        x, y = batch_of(0, dist.get_rank(), WORLD)
        model_engine.backward((model_engine(x) - y).square().mean())
        model_engine.step()
        losses.append(model_engine.last_report.loss)
    engine.init_distributed()
    first.destroy()
    assert dist.is_initialized()
    x, y = batch_of(1, dist.get_rank(), WORLD)
    second.backward((second(x) - y).square().mean())
    second.step()
    return losses[0], losses[1]


def test_q2_a_second_initialize_uses_the_group_that_is_there(ranks):
    for first, second in ranks(WORLD).run(initialize_twice):
        assert first == pytest.approx(second)


# --- Q3: plain backward --------------------------------------------------------------------------------------


def plain_spellings(stage: int, more: dict[str, Any]) -> dict[str, Tensor]:
    """loss.backward(), a backward of an output with a gradient of its own, and torch.autograd.backward."""
    model_engine = made(Predictor, stage, ACCUMULATION, **more)
    for step in range(3):
        for micro in range(ACCUMULATION):
            x, y = batch_of(step, micro * WORLD + dist.get_rank(), WORLD * ACCUMULATION)
            output = model_engine(x)
            if step == 0:
                ((output - y).square().sum() / 24).backward()
            elif step == 1:
                output.backward(2 * (output.detach() - y).to(output.dtype) / 24)
            else:
                torch.autograd.backward([(output - y).square().sum() / 24])
            model_engine.step()
    return model_engine.full_parameters()


@functools.cache
def plain_sum() -> dict[str, Tensor]:
    model = seeded(Predictor)
    optimizer = sgd(model)
    for step in range(3):
        for index in range(WORLD * ACCUMULATION):
            x, y = batch_of(step, index, WORLD * ACCUMULATION)
            ((model(x) - y).square().sum() / 24 / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return named(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("more", "tolerance"), [({}, 1e-6), ({"bf16": {"enabled": True}}, 2e-2)], ids=["fp32", "bf16"])
def test_q3_plain_backward_is_right(ranks, more, tolerance, stage):
    assert_same(ranks(WORLD).run(plain_spellings, stage, more), plain_sum(), tolerance)


def plain_only(model_engine: engine.Engine, loss: Callable[[], Tensor]) -> None:
    loss().backward()


def engine_then_plain(model_engine: engine.Engine, loss: Callable[[], Tensor]) -> None:
    model_engine.backward(loss())
    loss().backward()


def plain_then_engine(model_engine: engine.Engine, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    model_engine.backward(loss())


def on_one_rank(model_engine: engine.Engine, loss: Callable[[], Tensor]) -> None:
    """The other rank uses the engine's for both."""
    model_engine.backward(loss())
    if dist.get_rank() == 1:
        loss().backward()
    else:
        model_engine.backward(loss())


def refuse_under_scaling(stage: int, spelling: Callable[..., None]) -> str:
    model_engine = made(Predictor, stage, **STATIC)
    x, y = batch_of(0, dist.get_rank(), WORLD)
    try:
        spelling(model_engine, lambda: (model_engine(x).float() - y).square().mean())
        model_engine.step()
    except EngineError as error:
        return str(error)
    return "nothing was raised"


SPELLINGS = [plain_only, engine_then_plain, plain_then_engine, on_one_rank]
# At stage 2 ranks whose backwards differ come apart before the step: test_divergence.py has that message.
REFUSED = [(spelling, stage) for spelling in SPELLINGS for stage in STAGES if (spelling, stage) != (on_one_rank, 2)]


@pytest.mark.parametrize(("spelling", "stage"), REFUSED)
def test_q3_plain_backward_under_a_loss_scale_is_refused_even_beside_the_engines(ranks, spelling, stage):
    for message in ranks(WORLD).run(refuse_under_scaling, stage, spelling):
        assert "step 1" in message
        assert "loss scale 64" in message
        assert "model_engine.backward(loss)" in message


# --- Q4: several losses of one forward -----------------------------------------------------------------------


def several_losses(stage: int, accumulation: int) -> dict[str, Tensor]:
    model_engine = made(Predictor, stage, accumulation)
    for step in range(3):
        for micro in range(accumulation):
            x, y = batch_of(step, micro * WORLD + dist.get_rank(), WORLD * accumulation)
            output = model_engine(x)
            model_engine.backward((output - y).square().mean(), retain_graph=True)
            model_engine.backward(0.5 * output.abs().mean(), retain_graph=True)
            model_engine.backward(0.1 * (output.mean() - 1).square())
            model_engine.step()
    return model_engine.full_parameters()


@functools.cache
def plain_several(accumulation: int) -> dict[str, Tensor]:
    model = seeded(Predictor)
    optimizer = sgd(model)
    num_parts = WORLD * accumulation
    for step in range(3):
        for index in range(num_parts):
            x, y = batch_of(step, index, num_parts)
            output = model(x)
            loss = (output - y).square().mean() + 0.5 * output.abs().mean() + 0.1 * (output.mean() - 1).square()
            (loss / num_parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return named(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_q4_several_backwards_of_one_forward(ranks, accumulation, stage):
    assert_same(ranks(WORLD).run(several_losses, stage, accumulation), plain_several(accumulation))
