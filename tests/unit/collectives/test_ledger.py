"""What the ledger counts, against closed forms. test_kernel_counts.py asks the kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist

import engine
from engine.collectives.ledger import Ledger
from engine.collectives.objects import ObjectGroup
from engine.plan.cuts import AGREEMENT_NUMBERS
from tests.parity.runs import config_of
from tests.parity.tiers import slow
from tests.parity.toy import part, toy_batch, toy_model

ACCUMULATION = 2
FOUR_BYTES = 4


def stage_config(stage: int, world: int, **zero: Any) -> dict[str, Any]:
    # every block is a group of its own at stage 3
    zero = {"prefetch_bucket_size": 1, **zero} if stage == 3 else zero
    return config_of(stage=stage, world=world, accumulation=ACCUMULATION, zero_optimization=zero)


def train_and_count(config: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    """Two steps, then, between them and a third, an evaluation and a save."""
    model_engine, *_ = engine.initialize(model=toy_model(), config=config)
    mesh, reports = model_engine.mesh, []

    def step(number: int) -> None:
        for micro in range(ACCUMULATION):
            index = micro * mesh.dp_size + mesh.dp_rank
            model_engine.backward(model_engine(**part(toy_batch(number), index, ACCUMULATION * mesh.dp_size)))
            model_engine.step()
        reports.append(dict(model_engine.last_report.bytes_by_axis))

    step(0)
    step(1)
    model_engine.eval_batch(iter([part(toy_batch(2), mesh.dp_rank, mesh.dp_size)]), 1)
    if folder is not None:
        model_engine.save_checkpoint(folder)
    step(2)
    report = model_engine.last_report
    assert report.comm_bytes == sum(report.bytes_by_axis.values())
    found = {
        "steps": reports,
        "totals": model_engine.ledger.totals(),
        "operations": model_engine.ledger.operations(),
    }
    model_engine.destroy()
    return found


def train_all(configs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    return [train_and_count(config, f"{folder}/{index}") for index, config in enumerate(configs)]


SHAPES = {name: tuple(p.shape) for name, p in toy_model().named_parameters()}
NUM_ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())


def cut_by_rows(ranks: int, where: str) -> int:
    """Elements of the parameters inside (``blocks.``) or outside the blocks, each with its rows padded to the ranks."""
    inside = [shape for name, shape in SHAPES.items() if name.startswith("blocks.") == (where == "blocks")]
    return sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in inside)


def closed_form(stage: int, ranks: int) -> float:
    """Bytes that a rank sends in a step of two micro-batches, the agreement left out."""
    once = (ranks - 1) / ranks * FOUR_BYTES  # per element, one way
    if stage == 0:
        return 2 * once * NUM_ELEMENTS
    if stage == 1:
        return (1 + 1) * once * NUM_ELEMENTS
    if stage == 2:
        return (ACCUMULATION + 1) * once * NUM_ELEMENTS
    blocks, rest = cut_by_rows(ranks, "blocks"), cut_by_rows(ranks, "rest")
    return ACCUMULATION * once * (3 * blocks + 2 * rest)  # blocks are gathered for forward and again for backward


@pytest.mark.parametrize("world", [2, slow(3)])
def test_steps_send_what_the_closed_forms_say(ranks, world, tmp_path):
    configs = [stage_config(stage, world) for stage in range(4)]
    agreement = 2 * (world - 1) / world * AGREEMENT_NUMBERS * 8
    for rank, by_stage in enumerate(ranks(world).run(train_all, configs, str(tmp_path))):
        for stage, found in enumerate(by_stage):
            first, second, third = found["steps"]
            assert first == second == third, "an evaluation and a save belong to no step"
            axis = "dp_replicate" if stage == 0 else "dp_shard"
            assert set(first) == {axis, "control"}
            assert first["control"] == pytest.approx(agreement, abs=1)
            padding = 0 if stage in (0, 3) else 0.002  # the last bytes of every bucket
            expected = closed_form(stage, world)
            assert expected - 16 <= first[axis] <= expected * (1 + padding) + 16
            totals = found["totals"]
            assert totals["steps"] == 3 * sum(first.values())
            assert totals["steps"] == sum(found["operations"].values())
            assert totals["evaluation"] > 0
            # equal weights everywhere: the first rank broadcasts
            assert (totals["start"] >= FOUR_BYTES * NUM_ELEMENTS * (world - 1)) == (rank == 0)
            assert totals["checkpoint"] > 0


def test_replicas_of_shards_count_their_all_reduce(ranks):
    """At stage 3 that one is FSDP2's own."""
    for found in ranks(4).run(train_and_count, stage_config(3, 4, mics_shard_size=2)):
        elements = cut_by_rows(2, "blocks") + cut_by_rows(2, "rest")
        replicas = ACCUMULATION * 2 * (1 / 2) * FOUR_BYTES * elements / 2
        assert found["steps"][0]["dp_replicate"] == pytest.approx(replicas, abs=16)
        assert found["steps"][0]["dp_shard"] == pytest.approx(closed_form(3, 2), abs=16)


# --- 1-bit rounds --------------------------------------------------------------------------------------------

FREEZE_STEP, NUM_STEPS = 2, 8


def count_steps(configs: list[dict[str, Any]]) -> list[list[int]]:
    """For each config the bytes of every step on the data-parallel axis."""
    counted = []
    for config in configs:
        model_engine, *_ = engine.initialize(model=toy_model(), config=config)
        mesh, by_step = model_engine.mesh, []
        for number in range(NUM_STEPS):
            model_engine.backward(model_engine(**part(toy_batch(number), mesh.dp_rank, mesh.dp_size)))
            model_engine.step()
            by_step.append(model_engine.last_report.bytes_by_axis["dp_replicate"])
        assert model_engine.skipped_steps == 0
        model_engine.destroy()
        counted.append(by_step)
    return counted


@pytest.mark.parametrize("world", [2, slow(3)])
def test_one_bit_adam_sends_one_bit_each_way(ranks, world):
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": FREEZE_STEP}}
    fp16 = {"communication_data_type": "fp16", "fp16": {"loss_scale": 128.0}}
    kinds: list[dict[str, Any]] = [
        {"optimizer": one_bit},
        {"optimizer": one_bit, "precision": "fp16", **fp16},
        {"optimizer": None, "precision": "fp16", **fp16},
    ]
    configs = [config_of(stage=0, world=world, **kind) for kind in kinds]
    once = (world - 1) / world
    closed_form = 2 * once * NUM_ELEMENTS / 8 + 8 * (world - 1)
    for in_fp32, in_fp16, adamw in ranks(world).run(count_steps, configs):
        assert in_fp32[:FREEZE_STEP] == pytest.approx([2 * once * 4 * NUM_ELEMENTS] * FREEZE_STEP, abs=16)
        for sent in in_fp32[FREEZE_STEP:]:
            # every bucket has scales of its own and is padded to whole bytes for every rank
            assert closed_form <= sent <= closed_form + 6 * (8 * (world - 1) + 2 * world)
        share = FREEZE_STEP / NUM_STEPS
        assert sum(adamw) / sum(in_fp16) == pytest.approx(1 / (share + (1 - share) / 16), rel=0.01)


def send_objects() -> tuple[list[Any] | None, str, dict[tuple[str, str], int]]:
    ledger = Ledger()
    group = ObjectGroup(None, ledger)
    gathered = group.gather("x" * 1000 if dist.get_rank() else "first")
    told = group.broadcast("y" * 1000 if dist.get_rank() == 0 else None)
    ledger.book("checkpoint")
    return gathered, told, ledger.operations("checkpoint")


def test_objects(ranks):
    first, *others = ranks(3).run(send_objects)
    assert first[0] == ["first", "x" * 1000, "x" * 1000]
    assert first[2] == {
        ("world", "gather_object"): 0,
        ("world", "broadcast_object"): pytest.approx(2000, rel=0.05),
    }
    for gathered, told, operations in others:
        assert gathered is None
        assert told == "y" * 1000
        assert operations == {
            ("world", "gather_object"): pytest.approx(1000, rel=0.05),
            ("world", "broadcast_object"): 0,
        }


def test_apart_keeps_the_step_that_is_under_way():
    ledger = Ledger()
    ledger.add("dp_shard", "reduce_scatter", 5)
    with ledger.apart("evaluation"):
        ledger.add("dp_shard", "all_gather", 7)
    ledger.add("world", "all_reduce", 1)
    assert ledger.take() == {"dp_shard": 5, "world": 1}
    assert ledger.take() == {}
    assert ledger.totals() == {"evaluation": 7, "steps": 6}
