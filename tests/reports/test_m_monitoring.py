"""Monitors, metrics and gradient access: scalars of one's own, a norm whose name is true, no silent clipping."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import engine
from engine.collectives.stall import watch
from engine.full_state import foreign_clipping
from tests.parity.small import CASES, Case, Layers, Normalised, config_of, regression_batch, run_steps, seeded
from tests.parity.toy import part
from tests.reports.heard import Log

WORLD = 2
STAGES = range(4)
SGD = {"type": "SGD", "params": {"lr": 1.0}}


def write_scalars(folder: str) -> bool:
    monitors = {
        name: {"enabled": True, "output_path": folder, "job_name": name} for name in ("csv_monitor", "tensorboard")
    }
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config_of(1, 1, **monitors))
    for step in range(3):
        run_steps(model_engine, regression_batch, 1, first=step)
        model_engine.write_events([("Mine/accuracy", 0.1 * step, model_engine.global_samples)])
    model_engine.destroy()
    return True


def test_m1_scalars_of_ones_own_reach_every_monitor_once(ranks, tmp_path: Path):
    ranks(WORLD).run(write_scalars, str(tmp_path))
    (path,) = tmp_path.rglob("Mine_accuracy.csv")
    rows = list(csv.reader(path.open()))
    assert [(int(samples), float(value)) for samples, value in rows[1:]] == [
        (12 * (step + 1), pytest.approx(0.1 * step)) for step in range(3)
    ]
    (events,) = tmp_path.rglob("events.out.tfevents*")  # one file: the second rank wrote none
    assert b"Mine/accuracy" in events.read_bytes()


def clip(stage: int, maximum: float) -> dict[str, Any]:
    config = config_of(stage, 1, optimizer=SGD, gradient_clipping=maximum)
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config)
    before = model_engine.full_parameters()
    model_engine.backward(model_engine(**part(regression_batch(0), dist.get_rank(), WORLD)))
    gradients = model_engine.full_gradients()
    model_engine.step()
    after = model_engine.full_parameters()
    norm = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
    moved = torch.cat([(after[n] - before[n]).double().flatten() for n in before]).norm().item()
    return {"norm": norm, "reported": model_engine.get_global_grad_norm(), "moved": moved}


@pytest.mark.parametrize("stage", STAGES)
def test_m3_the_norm_that_is_reported_is_the_one_before_clipping(ranks, stage):
    for seen in ranks(WORLD).run(clip, stage, 0.1):
        assert seen["norm"] > 0.2
        assert seen["reported"] == pytest.approx(seen["norm"], rel=1e-6)
        assert seen["moved"] == pytest.approx(0.1, rel=1e-4)  # at a learning rate of 1 the step is the clipped gradient


def test_m3_the_name_says_so():
    assert "before clipping" in (engine.Engine.get_global_grad_norm.__doc__ or "")


# --- clipping by the user's own hand -------------------------------------------------------------------------


def clip_by_hand(stage: int) -> tuple[list[float], list[str], float]:
    foreign_clipping._has_warned = False
    heard = Log()
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config_of(stage, 1, optimizer=SGD))
    norms = []
    for step in range(2):
        model_engine.backward(model_engine(**part(regression_batch(step), dist.get_rank(), WORLD)))
        norms.append(float(nn.utils.clip_grad_norm_(model_engine.module.parameters(), 1e-3)))
        model_engine.step()
        norms.append(model_engine.get_global_grad_norm())
    stranger = nn.Linear(2, 2)
    stranger(torch.ones(1, 2)).sum().backward()
    others = float(nn.utils.clip_grad_norm_(stranger.parameters(), 1.0))
    logging.getLogger("engine").removeHandler(heard)
    return norms, [line for line in heard.lines if "clip_grad_norm_" in line], others


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_hand_changes_nothing_and_is_told_once(ranks, stage):
    (expected, *_), *_ = ranks(WORLD).run(without_clipping)
    for norms, lines, others in ranks(WORLD).run(clip_by_hand, stage):
        assert norms[1::2] == pytest.approx(expected, rel=1e-6)
        assert len(lines) == 1
        assert "gradient_clipping" in lines[0]
        assert others == pytest.approx(6**0.5)


def without_clipping() -> tuple[list[float], float]:
    model_engine, *_ = engine.initialize(model=seeded(Layers), config=config_of(0, 1, optimizer=SGD))
    return run_steps(model_engine, regression_batch, 2).norms, 0.0


# --- reading many costs as much as reading one ---------------------------------------------------------------


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(50))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x[:, :4]
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return (x - y).square().mean()


def count_collectives(stage: int) -> list[int]:
    model_engine, *_ = engine.initialize(model=seeded(Many), config=config_of(stage, 1))
    model_engine.backward(model_engine(**part(regression_batch(0), dist.get_rank(), WORLD)))
    model_engine.full_gradient("layers.0.weight")  # the gradients are reduced now
    counts = []
    for names in (["layers.0.weight"], None):
        before = watch._issued.total()
        assert len(model_engine.full_gradients(names)) == (100 if names is None else 1)
        counts.append(watch._issued.total() - before)
    return counts


@pytest.mark.parametrize("stage", STAGES)
def test_reading_a_hundred_gradients_takes_as_many_collectives_as_one(ranks, stage):
    for one, hundred in ranks(WORLD).run(count_collectives, stage):
        assert hundred == one <= 4


# --- the optimizer's state dict ------------------------------------------------------------------------------


def whole_state_dict(stage: int) -> dict[str, Any]:
    case = CASES["groups"]
    model = case.model()
    model_engine, optimizer, *_ = engine.initialize(
        model=model, config=config_of(stage, 1), model_parameters=case.groups(model)
    )
    run_steps(model_engine, regression_batch, 2)
    saved = optimizer.state_dict()
    run_steps(model_engine, regression_batch, 1, first=2)
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()
    same = all(
        torch.equal(value, again["state"][name][key])
        for name, state in saved["state"].items()
        for key, value in state.items()
    )
    return {"saved": saved, "same": same}


def test_the_optimizers_state_dict_is_whole_at_every_stage(ranks):
    by_stage = [ranks(WORLD).run(whole_state_dict, stage) for stage in STAGES]
    expected = by_stage[0][0]["saved"]
    assert expected["state"]["layers.0.weight"]["exp_avg"].shape == (13, 8)
    assert [len(group["params"]) for group in expected["param_groups"]] == [3, 4]
    assert expected["param_groups"][0]["weight_decay"] == 0.5
    for by_rank in by_stage:
        for outcome in by_rank:
            assert outcome["same"]
            assert [g["params"] for g in outcome["saved"]["param_groups"]] == [
                g["params"] for g in expected["param_groups"]
            ]
            for name, state in expected["state"].items():
                for key, value in state.items():
                    torch.testing.assert_close(outcome["saved"]["state"][name][key], value, rtol=1e-4, atol=1e-6)


# --- statistics that ranks do not share ----------------------------------------------------------------------


def build_normalised() -> list[str]:
    heard = Log()
    engine.initialize(model=seeded(Normalised), config=config_of(1, 1, Case(Normalised)))
    logging.getLogger("engine").removeHandler(heard)
    return [line for line in heard.lines if "batch statistics" in line]


def test_batch_statistics_of_ones_own_are_told_by_name(ranks):
    first, second = ranks(WORLD).run(build_normalised)
    assert len(first) == 1
    assert first[0].startswith("norm (1 in all)")
    assert second == []
    assert ranks(1).run(build_normalised) == [[]]
