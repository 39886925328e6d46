"""The 1-bit optimizers under a pipeline: each stage compresses between its data-parallel ranks what those of the whole
model would, and stages that share a parameter keep it equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from tests.parity.pipeline_models import batch_of, config_of, seeded
from tests.parity.tiers import slow

MODEL, ACCUMULATION = "tied_layers", 2
SAVED_AT, STEPS = 7, 14
PIPELINE = {"pipeline": {"stages": 2, "schedule": "1f1b"}}
ADAM = {"lr": 1e-2, "eps": 1e-4}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 5, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": 3, "coeff_beta": 0.5},
}
"""All switch early: 0/1 Adam sends one bit in step 3, then steps alone, synchronised last in step 12."""
Seen = tuple[list[float], list[float | None], dict[str, Tensor], dict[str, Tensor]]
"""Losses, norms, whole parameters, and before those what this rank itself held."""


def train(
    kind: str, folder: Path, config: dict[str, Any], resume: bool = False, bucket: int = 1, unit: str = "bucket"
) -> Seen:
    """By default with a bucket a parameter, so that what has one scale is the same with and without stages."""
    params = {**ADAM, **OPTIMIZERS[kind], "compression_unit": unit}
    more = {
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"reduce_bucket_size": bucket},
        **config,
    }
    model_engine, *_ = engine.initialize(model=seeded(MODEL), config=config_of(ACCUMULATION, **more))
    mesh, losses, norms = model_engine.mesh, [], []
    if resume:
        model_engine.load_checkpoint(folder, "saved")
    while (step := model_engine.global_steps) < STEPS:
        places = (micro * mesh.dp_size + mesh.dp_rank for micro in range(ACCUMULATION))
        parts = (batch_of(MODEL, step, place, ACCUMULATION * mesh.dp_size) for place in places)
        losses.append(model_engine.train_batch(parts).item())
        assert model_engine.last_report is not None
        norms.append(model_engine.last_report.grad_norm)
        if model_engine.global_steps == SAVED_AT and not resume:
            model_engine.save_checkpoint(folder, tag="saved")
    own = {info.name: p.detach().clone() for info, p in model_engine.parameter_registry.parameters()}
    whole = {name: value.clone() for name, value in model_engine.full_parameters().items()}
    model_engine.destroy()
    return losses, norms, whole, own


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stages_compress_what_the_whole_model_does(ranks, tmp_path, kind):
    expected = ranks(2).run(train, kind, tmp_path / "dp2", {}, timeout=240)
    apart = [name for name, value in expected[0][3].items() if not torch.equal(value, expected[1][3][name])]
    assert bool(apart) == (kind == "ZeroOneAdam")
    found = ranks(4).run(train, kind, tmp_path / "pp2xdp2", PIPELINE, timeout=240)
    for rank, (losses, norms, whole, own) in enumerate(found):
        of_losses, of_norms, of_whole, of_own = expected[rank % 2]
        assert losses == pytest.approx(of_losses, rel=0, abs=1e-5)
        assert norms == pytest.approx(of_norms, rel=1e-4)
        assert 0 < len(own) < len(of_own)
        for values, theirs in ((whole, of_whole), (own, of_own)):
            for name, value in values.items():
                assert (value - theirs[name]).abs().max() <= 1e-5, name
    resumed = ranks(4).run(train, kind, tmp_path / "pp2xdp2", PIPELINE, True, timeout=240)
    for again, before in zip(resumed, found, strict=True):
        assert again[0] == before[0][SAVED_AT:]
        for name, value in before[3].items():
            assert torch.equal(again[3][name], value), name


@pytest.mark.parametrize("unit", ["bucket", slow("group"), slow("tensor")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_copies_on_two_stages_stay_equal(ranks, tmp_path, kind, unit):
    """In buckets of many parameters, where the scale of a stage's other parameters must not touch a shared one's."""
    *_, owns = zip(*ranks(4).run(train, kind, tmp_path, PIPELINE, False, 10**6, unit, timeout=240), strict=True)
    for data_rank in range(2):
        first, last = owns[data_rank], owns[2 + data_rank]
        shared = first.keys() & last.keys()
        assert len(shared) == 1
        for name in shared:
            assert torch.equal(first[name], last[name]), name


def test_other_stages_go_on_with_errors_of_zero(ranks, tmp_path):
    """Errors belong to ranks, and a warning says so; everything else of a checkpoint fits any number of stages."""
    *_, saved = ranks(4).run(train, "OneBitAdam", tmp_path, PIPELINE, timeout=240)
    for losses, _, _, _ in ranks(2).run(train, "OneBitAdam", tmp_path, {}, True, timeout=240):
        assert losses[0] == pytest.approx(saved[0][SAVED_AT], rel=0, abs=1e-6)
