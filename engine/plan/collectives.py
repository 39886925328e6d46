"""The collectives of one optimizer step as one rank calls them: how many, on which axis, and the bytes they send.

Calls and bytes are those of the ledger (engine/collectives/ledger.py): an all-reduce of B bytes over N ranks sends
2 (N-1)/N B, a reduce-scatter, an all-gather and an all-to-all (N-1)/N B each, a send B. Steps are applied steps in
which every parameter gets a gradient; a skipped one, or one with unused parameters, asks the other ranks once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

from engine.plan.crossings import Call, cross_axes
from engine.plan.cuts import AGREEMENT_NUMBERS, row_range
from engine.plan.facts import ITEM_BYTES, ModelFacts
from engine.plan.plan import Plan
from engine.plan.stages import stages_of
from engine.plan.units import FlatBucket, Layout, Unit, compute_dtype, layout

AGREEMENT_BYTES = AGREEMENT_NUMBERS * 8


@dataclass(frozen=True)
class Collective:
    """Calls of one operation on one mesh axis for one purpose, per optimizer step. ``sent_bytes``: of all of them."""

    axis: str
    operation: str
    purpose: str
    calls: int
    sent_bytes: int


def count_collectives(
    plan: Plan, facts: ModelFacts, pipeline_rank: int = 0, in_one_bit: bool = False
) -> tuple[Collective, ...]:
    """Of the first rank of those that hold a pipeline rank's part of the model. Needs ``facts.parameters``.

    ``in_one_bit``: of a step in which a 1-bit optimizer sends signs; otherwise of one that sends gradients in full.
    """
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    cut = layout(plan, facts, pipeline_rank)
    along = (*cross_axes(plan, facts, pipeline_rank), *_of_shared(plan, facts, cut))
    for axis, operation, purpose, calls, sent_bytes in (*_all(plan, facts, cut, in_one_bit), *along):
        if calls:
            before = found.get((axis, operation, purpose), (0, 0))
            found[axis, operation, purpose] = (before[0] + calls, before[1] + calls * sent_bytes)
    return tuple(Collective(*key, *counted) for key, counted in found.items())


def _all(plan: Plan, facts: ModelFacts, cut: Layout, in_one_bit: bool) -> Iterator[Call]:
    for bucket in cut.buckets:
        yield from _in_one_bit(plan, bucket) if in_one_bit else _of_bucket(plan, bucket, is_scalars=bool(cut.units))
    for unit in cut.units:
        yield from _of_unit(plan, unit)
    yield from _of_the_optimizer(plan, facts)
    size = plan.world.size
    if size > 1:
        yield "control", "all_reduce", "agreement", 1, all_reduce_bytes(AGREEMENT_BYTES, size)


def all_reduce_bytes(size_bytes: int, ranks: int) -> int:
    """What one rank sends in an all-reduce of ``size_bytes``."""
    return 2 * (ranks - 1) * size_bytes // ranks


def rounds(plan: Plan) -> int:
    """Reductions of every gradient in a step: stages 2 and 3 reduce in every backward, but not under a pipeline."""
    in_every_backward = plan.zero.stage >= 2 and plan.batch.managed and plan.degrees.pp == 1
    return plan.batch.accumulation_steps if in_every_backward else 1


def _of_bucket(plan: Plan, bucket: FlatBucket, is_scalars: bool) -> Iterator[Call]:
    """Gradients reduced, parameters gathered. 0-dim parameters beside a sharded model travel at the boundary."""
    shard, replicas = plan.shard_size, plan.num_replicas
    times = 1 if is_scalars else rounds(plan)
    reduced = ITEM_BYTES.get(bucket.gradient_dtype, 4)
    if plan.precision.reduce != plan.precision.accumulate:
        reduced = ITEM_BYTES[plan.precision.reduce]
    own = bucket.own(0)
    if shard > 1:
        yield "dp_shard", "reduce_scatter", "gradients", times, (bucket.numel - own) * reduced
        gathered = own * ITEM_BYTES.get(bucket.values_dtype, 4) * (shard - 1)
        yield "dp_shard", "all_gather", "parameters", 1, gathered
        if replicas > 1:
            yield "dp_replicate", "all_reduce", "gradients", times, all_reduce_bytes(own * reduced, replicas)
    elif replicas > 1:
        yield "dp_replicate", "all_reduce", "gradients", times, all_reduce_bytes(bucket.numel * reduced, replicas)


def _in_one_bit(plan: Plan, bucket: FlatBucket) -> Iterator[Call]:
    """Signs and scales to the server of every chunk and from each to all, as the docstring of
    engine/collectives/compressed_all_reduce.py says; of that of the first chunk."""
    assert plan.optimizer is not None
    ranks, params = plan.num_replicas, plan.optimizer.params
    if ranks == 1:
        return
    quantum = ranks * (lcm(ranks, 8) if params.get("compat") == "deepspeed" else 8)
    chunk = -(-bucket.numel // quantum) * quantum // ranks
    sizes = [m.numel for m in bucket.members] if params["compression_unit"] == "tensor" else [bucket.numel]
    starts = list(accumulate(sizes, initial=0))[:-1]
    first_server = sum(start < chunk for start in starts)
    yield "dp_replicate", "all_to_all", "signs to be averaged", 1, (ranks - 1) * (chunk // 8 + 4 * len(sizes))
    yield "dp_replicate", "all_gather", "signs of the mean", 1, (ranks - 1) * (chunk // 8 + 4 * first_server)


def _of_unit(plan: Plan, unit: Unit) -> Iterator[Call]:
    """Stage 3: gathered for forward and, where it was let go of, for backward; reduced after every backward."""
    shard, replicas = plan.shard_size, plan.num_replicas
    times = rounds(plan)
    own = unit.shard_numel(shard)
    gathered = ITEM_BYTES[compute_dtype(plan, unit.members[0].dtype)]
    yield "dp_shard", "all_gather", "parameters", times, own * gathered * (shard - 1)
    if unit.again and plan.degrees.pp == 1:
        near = plan.zero.reshard_after_forward
        group = shard if near is True else int(near)
        part = own * shard // group
        yield "dp_shard", "all_gather", "parameters", times, part * gathered * (group - 1)
    trained = unit.shard_numel(shard, trainable=True)
    if trained:
        reduced = 8 if any(p.dtype == "fp64" for p in unit.members) else ITEM_BYTES[plan.precision.reduce]
        yield "dp_shard", "reduce_scatter", "gradients", times, trained * (shard - 1) * reduced
        if replicas > 1:
            yield "dp_replicate", "all_reduce", "gradients", times, all_reduce_bytes(trained * reduced, replicas)


def _of_shared(plan: Plan, facts: ModelFacts, cut: Layout) -> Iterator[Call]:
    """Gradients of parameters that several pipeline ranks hold, from each to each of the others once a step: this
    rank's shards in fp32, all that the same ranks hold together, and for each a number that says whether it is used."""
    stages, shards = stages_of(plan, facts), plan.shard_size
    held: dict[tuple[int, ...], int] = {}
    for bucket in cut.buckets:
        for _, numel in bucket.pieces(1):
            holders = stages.holders(bucket.members[0])
            held[holders] = held.get(holders, 0) + numel + 1
    for unit in cut.units:
        for parameter in unit.members:
            start, stop = row_range(parameter.shape, 0, shards)
            if parameter.trainable and stop > start:
                holders = stages.holders(parameter)
                held[holders] = held.get(holders, 0) + stop - start + 1
    for holders, numel in held.items():
        yield "pp", "send", "gradients of shared parameters", len(holders) - 1, 4 * numel


def _of_the_optimizer(plan: Plan, facts: ModelFacts) -> Iterator[Call]:
    """Lamb needs the norms of whole parameters and of their updates: two fp32 numbers for each."""
    if plan.optimizer is None or plan.optimizer.type != "Lamb":
        return
    for axis, ranks in (("dp_shard", plan.shard_size), ("tp", plan.degrees.tp)):
        if ranks > 1:
            yield axis, "all_reduce", "norms", 1, all_reduce_bytes(2 * 4 * len(facts.parameters), ranks)
