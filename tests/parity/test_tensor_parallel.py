"""Layers split over tp ranks, beside every ZeRO stage, give what one process gives with the whole model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.parity.compare import LOSSES, NORMS, PARAMETERS
from tests.parity.runs import config_of
from tests.parity.split_models import MODELS, SplitRun, train_split
from tests.parity.toy import Result, reference_run

SGD = {"type": "SGD", "params": {"lr": 0.05}}
CLIP = 0.5

MESHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2": (2, 2, {}),
    "tp4": (4, 4, {}),
    "dp2 x tp2": (4, 2, {}),
    "hsdp 2 x 2 x tp2": (8, 2, {"mics_shard_size": 2}),
}
"""Name -> ranks, tp, and what goes into `zero_optimization`."""


def assert_equal_to(
    expected: Result,
    by_rank: list[SplitRun],
    losses: float = LOSSES,
    parameters: float = PARAMETERS,
    norms: float = NORMS,
) -> None:
    first = by_rank[0]
    for rank in by_rank[1:]:
        assert rank.result.losses == first.result.losses
        assert rank.result.norms == first.result.norms
        for name, value in first.copies.items():
            assert torch.equal(rank.copies[name], value), f"ranks hold different {name}"
        for name, value in first.result.parameters.items():
            assert torch.equal(rank.result.parameters[name], value), f"ranks see different {name}"
    assert first.result.losses == pytest.approx(expected.losses, rel=0, abs=losses)
    assert first.result.norms == pytest.approx(expected.norms, rel=norms)
    assert first.result.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        difference = (first.result.parameters[name] - value).abs().max().item()
        assert difference <= parameters, f"{name} is off by {difference:.2e}"


@functools.cache
def reference(model: str, precision: str, num_parts: int, steps: int) -> Result:
    whole = MODELS[model](1)
    if precision == "fp32":
        return reference_run(model=whole, steps=steps, clip=CLIP)
    return reference_run(
        model=whole,
        num_parts=num_parts,
        steps=steps,
        clip=CLIP,
        precision=precision,
        optimizer="SGD",
        params={"lr": 0.05},
    )


def run(ranks: Any, model: str, mesh: str, stage: int, precision: str, accumulation: int) -> None:
    world, tp, zero = MESHES[mesh]
    steps = 10 if precision == "fp32" and (model, mesh, stage, precision) not in QUICK else 3
    steps = 3 if world == 8 else steps
    config = config_of(
        stage=stage,
        precision=precision,
        accumulation=accumulation,
        clip=CLIP,
        optimizer=None if precision == "fp32" else SGD,
        zero_optimization=zero if stage == 3 else {},
    )
    by_rank = ranks(world).run(train_split, model, config, tp, steps, timeout=300)
    expected = reference(model, precision, world // tp * accumulation, steps)
    tolerances = {} if precision == "fp32" else {"losses": 1e-3, "parameters": 1e-3, "norms": 1e-2}
    assert_equal_to(expected, by_rank, **tolerances)


CELLS = [
    (model, mesh, stage, precision)
    for model in MODELS
    for mesh in MESHES
    for stage in range(4)
    for precision in ("fp32", "bf16")
    if not (model == "qwen3" and mesh == "tp4")
]
QUICK = {
    ("toy", "tp2", 0, "fp32"),
    ("toy", "tp2", 2, "bf16"),
    ("toy", "dp2 x tp2", 1, "fp32"),
    ("toy", "tp4", 2, "fp32"),
    ("llama", "dp2 x tp2", 3, "fp32"),
    ("llama", "tp4", 0, "bf16"),
    ("llama", "tp2", 1, "fp32"),
    ("gpt2", "tp2", 3, "fp32"),
    ("gpt2", "dp2 x tp2", 2, "fp32"),
    ("gpt2", "dp2 x tp2", 0, "bf16"),
    ("qwen3", "dp2 x tp2", 1, "bf16"),
    ("qwen3", "tp2", 2, "fp32"),
    ("llama", "hsdp 2 x 2 x tp2", 3, "fp32"),
    ("toy, sequence", "tp4", 0, "fp32"),
    ("llama, sequence", "dp2 x tp2", 3, "fp32"),
    ("gpt2, sequence", "tp2", 2, "bf16"),
}
"""Every pair of a mesh, a stage, a precision and a model that matters beside another."""


@pytest.mark.parametrize(
    ("model", "mesh", "stage", "precision"),
    [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=[] if cell in QUICK else pytest.mark.slow)
        for cell in CELLS
    ],
)
def test_equal_to_one_process(ranks, model, mesh, stage, precision):
    run(ranks, model, mesh, stage, precision, accumulation=2 if stage == 1 else 1)
