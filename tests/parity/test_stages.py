"""Every ZeRO stage, precision, accumulation and clipping gives what one plain PyTorch process gives.

The quick suite has every pair of two settings, `make matrix` every cell.
"""

from __future__ import annotations

import functools
import itertools

import pytest

from tests.parity.compare import assert_equal_to
from tests.parity.runs import config_of, train
from tests.parity.tiers import tiers
from tests.parity.toy import Result, reference_run

SGD = {"type": "SGD", "params": {"lr": 0.05}}
CLIP = 0.5
SPLITS = [(1, 1), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]
"""Ranks and micro-batches on each."""
FP32 = [(stage, *split, clip) for stage, split, clip in itertools.product(range(4), SPLITS, (0.0, CLIP))]
QUICK_FP32 = [cell for number, cell in enumerate(FP32) if (cell[0] + number // 2 + number) % 2 == 0]
BITS_16 = list(itertools.product(("bf16", "fp16"), range(4), (1, 2), (1, 3), (0.0, CLIP)))
SLOW_OF = 5


def _is_quick(precision: str, stage: int, world: int, accumulation: int, clip: float) -> bool:
    """An orthogonal array of 8 of the 64 cells: the last three settings are sums of the bits of the first two."""
    is_fp16, low, high = precision == "fp16", bool(stage & 1), bool(stage & 2)
    return (world == 2, accumulation == 3, clip > 0) == (is_fp16 ^ low, is_fp16 ^ high, is_fp16 ^ low ^ high)


def _parameters(cells: list, quick: list) -> list:
    return [
        pytest.param(*cell, id="-".join([*map(str, cell[:-1]), "clipped" if cell[-1] else "unclipped"]), marks=marks)
        for cell, marks in tiers(cells, quick, SLOW_OF)
    ]


reference = functools.cache(reference_run)


@pytest.mark.parametrize(("stage", "world", "accumulation", "clip"), _parameters(FP32, QUICK_FP32))
def test_fp32(ranks, stage, world, accumulation, clip):
    config = config_of(stage=stage, accumulation=accumulation, world=world, clip=clip)
    assert_equal_to(reference(clip=clip), ranks(world).run(train, config))


@functools.cache
def sgd_reference(precision: str, num_parts: int, clip: float, loss_scale: float) -> Result:
    return reference_run(
        num_parts=num_parts,
        steps=3,
        precision=precision,
        clip=clip,
        optimizer="SGD",
        params={"lr": 0.05},
        loss_scale=loss_scale,
    )


@pytest.mark.parametrize(
    ("precision", "stage", "world", "accumulation", "clip"),
    _parameters(BITS_16, [cell for cell in BITS_16 if _is_quick(*cell)]),
)
def test_16_bit(ranks, precision, stage, world, accumulation, clip):
    """The same micro-batches and cast points in one process: only the order of fp32 sums may differ."""
    scale = 1024.0 if precision == "fp16" else 1.0
    config = config_of(
        stage=stage, precision=precision, accumulation=accumulation, world=world, clip=clip, optimizer=SGD
    )
    if precision == "fp16":
        config["fp16"]["loss_scale"] = scale
    by_rank = ranks(world).run(train, config, steps=3)
    expected = sgd_reference(precision, world * accumulation, clip, scale)
    assert_equal_to(expected, by_rank, losses=1e-3, parameters=1e-3, norms=1e-2)
