"""Every ZeRO stage, precision, accumulation and clipping gives what one plain PyTorch process gives."""

from __future__ import annotations

import functools

import pytest

from tests.parity.compare import assert_equal_to
from tests.parity.runs import config_of, train
from tests.parity.toy import Result, reference_run

SGD = {"type": "SGD", "params": {"lr": 0.05}}
CLIP = 0.5

reference = functools.cache(reference_run)


@pytest.mark.parametrize("clip", [0.0, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
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


@pytest.mark.parametrize("clip", [0.0, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
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
