"""A run that stops three times is, to the bit, the run that never stopped: parameters, moments, samples, scale, rate.

Dropout, random augmentation in loader workers, accumulation, a loss scale that moves, and epochs that end in between.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import engine
from tests.parity.augmented import Augmented
from tests.parity.runs import pieces_of
from tests.parity.small import seeded
from tests.parity.test_resume import moments_of
from tests.parity.tiers import tiers

NUM_STEPS, STOPS = 40, (7, 20, 33)
GLOBAL_BATCH, ACCUMULATION = 8, 2
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}},
}
PRODUCT = [(stage, world, precision) for stage in range(4) for world in (1, 2) for precision in PRECISIONS]
COVER = [(0, 1, "bf16"), (3, 2, "fp16")]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(3))
        self.last = nn.Linear(8, 4)
        self.seen: list[int] = []

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        self.seen += ids.tolist()
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(self.last(x).float(), y.float())


def train(stage: int, precision: str, folder: Path | None) -> dict[str, Any]:
    """To the end at one go, or, given a ``folder``, in parts that each begin with a new model and engine."""
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": NUM_STEPS}},
        "data": {"num_workers": 2},
        **PRECISIONS[precision],
    }
    told: dict[str, Any] = {"ids": [], "scales": [], "rates": [], "losses": []}
    for stop in (*STOPS, NUM_STEPS) if folder is not None else (NUM_STEPS,):
        model = seeded(Dropped)
        model_engine, *_ = engine.initialize(model=model, config=config, training_data=Augmented())
        if folder is not None and stop != STOPS[0]:
            model_engine.load_checkpoint(folder)
        while model_engine.global_steps < stop:
            told["losses"].append(model_engine.train_batch().item())
            told["scales"].append(model_engine.loss_scale)
            told["rates"].append(model_engine.get_lr()[0])
        if folder is not None:
            model_engine.save_checkpoint(folder)
        told["ids"] += model.seen
        told["skipped"] = model_engine.skipped_steps
        if stop == NUM_STEPS:
            digest = hashlib.sha256()
            for name, _, _, values in (*pieces_of(model_engine), *moments_of(model_engine)):
                digest.update(name.encode() + values.numpy().tobytes())
            told["digest"] = digest.hexdigest()
        model_engine.destroy()
    return told


def check(ranks: Any, folder: Path, stage: int, world: int, precision: str) -> None:
    straight = ranks(world).run(train, stage, precision, None, timeout=200)
    stopped = ranks(world).run(train, stage, precision, folder, timeout=200)
    for whole, parts in zip(straight, stopped, strict=True):
        for what, expected in whole.items():
            assert parts[what] == expected, what
        assert len(whole["ids"]) == NUM_STEPS * GLOBAL_BATCH // world
    if precision == "fp16":
        assert straight[0]["skipped"] > 0
        assert len(set(straight[0]["scales"])) > 2


@pytest.mark.parametrize(
    ("stage", "world", "precision"),
    [pytest.param(*cell, marks=marks) for cell, marks in tiers(PRODUCT, COVER, slow_of=3)],
)
def test_three_stops_change_no_bit(ranks, tmp_path, stage, world, precision):
    check(ranks, tmp_path, stage, world, precision)
