"""What an engine draws at random, answers before it has trained, and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.contracts import EngineError, LossSum
from tests.parity.small import Case, Layers, config_of, gpt, regression_batch, run_steps, seeded
from tests.parity.toy import part

WORLD = 2
STAGES = range(4)
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
CASE = Case(Layers)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 64), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x))


def draw_twice(stage: int) -> list[Tensor]:
    """The outputs of two forwards of one micro-batch, of the next one, and of the first in an engine made anew."""
    outputs = []
    for _ in range(2):
        model_engine, *_ = engine.initialize(model=seeded(Noisy), config=config_of(stage, 1))
        for _ in range(2):
            x = torch.ones(3, 8)
            pair = [model_engine(x), model_engine(x)]
            outputs += [output.detach() == 0 for output in pair]
            model_engine.backward((pair[0] * pair[1]).mean())
            model_engine.step()
        model_engine.destroy()
    return outputs


@pytest.mark.parametrize("stage", [0, 3])
def test_every_forward_draws_its_own_dropout_and_every_run_the_same(ranks, stage):
    by_rank = ranks(WORLD).run(draw_twice, stage)
    masks = [mask for outputs in by_rank for mask in outputs[:4]]
    for index, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[index + 1 :])
    for outputs in by_rank:
        assert all(torch.equal(outputs[i], outputs[i + 4]) for i in range(4))


# --- learning rates before the first step --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params", "lr"),
    [
        (None, {}, 0.1),
        ("WarmupLR", {"warmup_min_lr": 1e-4}, 1e-4),
        ("WarmupDecayLR", {"total_num_steps": 10}, 0.0),
        ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 2}, 0.0),
        ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 0}, 0.1),
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-3}, 1e-3),
        ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2}, 1e-3),
        ("CosineAnnealingLR", {"T_max": 10}, 0.1),
        ("LinearLR", {"start_factor": 0.5}, 0.05),
    ],
)
def test_get_lr_answers_before_the_first_step(kind, params, lr):
    more = {"scheduler": {"type": kind, "params": params}} if kind else {}
    model_engine, _, _, schedule = engine.initialize(model=CASE.model(), config=config_of(0, 1, optimizer=SGD, **more))
    assert model_engine.get_lr() == pytest.approx([lr])
    assert schedule.get_last_lr() == pytest.approx([lr])


# --- refusals ------------------------------------------------------------------------------------------------


def plain_backward_in_fp16(stage: int) -> str:
    model_engine, *_ = engine.initialize(model=CASE.model(), config=config_of(stage, 1, fp16={"enabled": True}))
    model_engine(**part(regression_batch(0), model_engine.mesh.dp_rank, WORLD)).backward()
    try:
        model_engine.step()
    except EngineError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("stage", STAGES)
def test_plain_backward_in_fp16_is_refused(ranks, stage):
    for message in ranks(WORLD).run(plain_backward_in_fp16, stage):
        assert "model_engine.backward(loss)" in message
        assert "loss scale" in message


def initialize_again(stage: int, destroyed: bool) -> str:
    model = CASE.model()
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage, 1))
    if destroyed:
        model_engine.destroy()
    try:
        again, *_ = engine.initialize(model=model, config=config_of(stage, 1))
    except EngineError as error:
        return str(error)
    run_steps(again, regression_batch, 1)
    return "accepted"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("destroyed", [False, True])
def test_a_model_belongs_to_one_engine(ranks, stage, destroyed):
    for message in ranks(WORLD).run(initialize_again, stage, destroyed):
        if destroyed and stage < 3:
            assert message == "accepted"
        else:
            assert "already belongs to an engine" in message


def test_bad_losses_are_refused():
    model_engine, *_ = engine.initialize(model=CASE.model(), config=config_of(0, 2))
    loss = model_engine(**part(regression_batch(0), 0, 2))
    for bad in (loss.detach(), torch.ones(3, requires_grad=True), 1.0):
        with pytest.raises(EngineError, match="scalar loss"):
            model_engine.backward(bad)
    model_engine.backward(loss, retain_graph=True)
    with pytest.raises(EngineError, match="mixes LossSum"):
        model_engine.backward(LossSum(loss, 1.0))


def test_groups_of_parameters_that_do_not_fit_are_refused():
    model = gpt()
    stranger = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(EngineError, match="the model does not"):
        engine.initialize(model=model, config=config_of(0, 1), model_parameters=stranger)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 4, dtype=torch.float64)


def initialize_two_dtypes(more: dict[str, Any]) -> str:
    try:
        engine.initialize(model=TwoDtypes(), config=config_of(3, 1, **more))
    except EngineError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}])
def test_stage_3_needs_one_dtype(ranks, more):
    for message in ranks(WORLD).run(initialize_two_dtypes, more):
        assert "parameters in float32, float64" in message
        assert "stage 0, 1 or 2" in message
