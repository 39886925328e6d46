"""Bytes of model states and collectives per step: the plan against the tensors and the ledger of real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.plan_against_real import differences
from tests.parity.tiers import slow
from tests.plan.real_counts import CP, ONE_BIT, ROWS, SP, counted, planned, settings


def compare(ranks: Any, world: int, config: dict[str, Any], kind: str = "toy") -> None:
    for expected, found in zip(planned(world, config, kind), ranks(world).run(counted, config, kind), strict=True):
        assert found.states["parameters"]
        assert found.states["gradients"]
        assert not differences(expected, found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, slow(4)])
def test_toy(ranks: Any, world: int, stage: int) -> None:
    compare(ranks, world, settings(stage))


@pytest.mark.parametrize(("stage", "slices"), [(0, SP), (3, CP)])
def test_slices_of_sequences(ranks: Any, stage: int, slices: dict[str, Any]) -> None:
    compare(ranks, 2, settings(stage, **slices))


@pytest.mark.parametrize("row", [row if world == 2 else slow(row) for row, (world, _) in ONE_BIT.items()])
def test_steps_in_one_bit(ranks: Any, row: str) -> None:
    """Of the first rank: others serve chunks in which another number of tensors, each with its scale, lies."""
    world, config = ONE_BIT[row]
    found = ranks(world).run(counted, config)[0]
    assert ("dp_replicate", "all_to_all") in found.calls
    assert planned(world, config)[0].calls == found.calls


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row, (world, _) in ROWS.items() if world == 8])
def test_eight_ranks(ranks: Any, row: str) -> None:
    compare(ranks, *ROWS[row])


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2), 3])
def test_16_bit_with_gradients_in_16_bit(ranks: Any, stage: int) -> None:
    bf16 = {"bf16": {"enabled": True}}
    compare(ranks, 2, settings(stage, **bf16))
    compare(ranks, 2, settings(stage, **bf16, data_types={"grad_accum_dtype": "bf16"}))
    compare(ranks, 2, settings(stage, **bf16, communication_data_type="bf16"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ties_frozen_and_0_dim_parameters(ranks: Any, stage: int) -> None:
    compare(ranks, 3, settings(stage, zero_optimization={} if stage < 3 else {"stage3_prefetch_bucket_size": 1}), "odd")


@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}])
def test_groups_of_ranks(ranks: Any, zero: dict[str, int]) -> None:
    compare(ranks, 4, settings(3, zero_optimization=zero))


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        ("Lamb", {}),
        ("SGD", {"momentum": 0.9}),
        ("NAdam", {}),
        ("Adagrad", {}),
        ("RMSprop", {"centered": True}),
        ("Lion", {}),
    ],
)
def test_optimizers(ranks: Any, optimizer: str, params: dict[str, Any]) -> None:
    compare(ranks, 2, settings(2, optimizer={"type": optimizer, "params": {"lr": 1e-3, **params}}))


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2), 3])
def test_tensor_parallel_ranks_beside_every_stage(ranks: Any, stage: int) -> None:
    compare(ranks, 4, settings(stage, tensor_parallel={"size": 2}))


def test_tensor_parallel_ranks_alone(ranks: Any) -> None:
    compare(ranks, 2, settings(0, tensor_parallel={"size": 2}, bf16={"enabled": True}))
