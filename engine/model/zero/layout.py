"""How parameters are laid out in the flat buckets of stages 0 to 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from engine.collectives.shards import ShardGroup
from engine.model.zero.bucket import Bucket, Member
from engine.model.zero.buckets import BucketReduction
from engine.model.zero.local_gradients import LocalGradients
from engine.model.zero.shards import ParameterShard, owners_of
from engine.parameters import ParameterInfo
from engine.plan import PrecisionPlan, ZeroPlan
from engine.plan.cuts import owner_bounds, padded, runs

Granularity = Literal["elementwise", "whole", "flat"]
"""Whether the optimizer may step on any slice of a parameter, needs whole parameters, or steps on whole flat buckets of
one parameter group each and may ask for gradients that are not reduced (stage 0 only)."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF = (torch.bfloat16, torch.float16)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16-bit parameters, else the parameter's own."""
    return torch.float32 if dtype in HALF else dtype


def compute_dtype(dtype: torch.dtype, precision: PrecisionPlan) -> torch.dtype:
    """What forward uses for a parameter of ``dtype``: the config's 16-bit type, else the parameter's own."""
    return dtype if precision.compute == "fp32" or not dtype.is_floating_point else DTYPES[precision.compute]


def build_buckets(
    parameters: Sequence[tuple[ParameterInfo, nn.Parameter]],
    zero: ZeroPlan,
    precision: PrecisionPlan,
    granularity: Granularity,
    shard_group: ShardGroup,
    replicate_group: ShardGroup,
    dp_size: int,
    shared: Mapping[int, tuple[int, ...]] | None = None,
) -> BucketReduction:
    """Move ``parameters`` into buckets (their ``.data`` become views) and return the role that owns them.

    The values must be equal on all ranks already. With granularity ``whole`` no parameter is cut: the ranks own whole
    parameters, balanced by size. With ``flat`` no bucket holds parameters of two groups. Where layers are split over
    tp ranks, what all of them hold alike lies in buckets of its own: it counts once in the norm, and no tp rank's own
    values may touch it. ``dp_size``: the ranks over which gradients are averaged; over the slices of a sequence they
    are summed. ``shared``: registry index -> the pipeline ranks that hold the parameter; those of one set of ranks have
    buckets of their own too, the same on each.
    """
    with_others = shared or {}
    owner_of = dict.fromkeys((info.index for info, _ in parameters), 0)
    if granularity == "whole":
        owner_of = owners_of([info for info, _ in parameters], with_others, shard_group.size)
    buckets = []
    limit = sum(info.numel for info, _ in parameters) if zero.whole_groups else zero.bucket_elements
    by_group = granularity == "flat"
    ordered = list(reversed(parameters))
    ordered.sort(
        key=lambda item: (
            (item[0].group or 0) if by_group else 0,
            item[0].num_copies,
            with_others.get(item[0].index, ()),
        )
    )
    kinds = [
        (i.numel, (i.dtype, i.num_copies, i.group if by_group else None, with_others.get(i.index))) for i, _ in ordered
    ]
    for positions in runs(kinds, limit):
        run = [ordered[position] for position in positions]
        if granularity == "whole":
            run = sorted(run, key=lambda item: owner_of[item[0].index])
            bounds = owner_bounds([i.numel for i, _ in run], [owner_of[i.index] for i, _ in run], shard_group.size)
        else:
            bounds = shard_group.even_bounds(padded(sum(info.numel for info, _ in run), shard_group.size))
        buckets.append(_fill(run, bounds, precision, shard_group))
    reduce_dtype = DTYPES[precision.reduce]
    kind = LocalGradients if granularity == "flat" else BucketReduction
    return kind(
        buckets,
        shard_group,
        replicate_group,
        stage=zero.stage,
        reduce_dtype=reduce_dtype if precision.reduce != precision.accumulate else None,
        predivide_factor=zero.predivide_factor,
        divisor=dp_size if zero.reduce_op == "mean" else 1.0,
    )


@torch.no_grad()
def _fill(
    run: Sequence[tuple[ParameterInfo, nn.Parameter]],
    bounds: list[int],
    precision: PrecisionPlan,
    shard_group: ShardGroup,
) -> Bucket:
    original = torch.zeros(bounds[-1], dtype=run[0][1].dtype, device=run[0][1].device)
    members, offset = [], 0
    for info, parameter in run:
        members.append(Member(info, parameter, offset))
        view = original[offset : offset + info.numel].view(info.shape)
        view.copy_(parameter)
        parameter.data = view  # frees the parameter's own storage before the next one is copied
        offset += info.numel

    dtype = compute_dtype(original.dtype, precision)
    own = slice(bounds[shard_group.rank], bounds[shard_group.rank + 1])
    values = original
    if dtype != original.dtype:
        values = original.to(dtype)
        for member in members:
            member.parameter.data = values[member.offset : member.stop].view(member.info.shape)
    master = values[own]
    if master_dtype(dtype) != dtype:
        master = original[own].to(master_dtype(dtype), copy=True)
    accumulate = DTYPES[precision.accumulate] if dtype in (torch.float32, *HALF) else dtype
    bucket = Bucket(members, bounds, shard_group.rank, values, master, accumulate)
    bucket.shards = list(_shards(members, own, master))
    return bucket


def _shards(members: Sequence[Member], own: slice, master: Tensor) -> list[tuple[ParameterShard, int]]:
    """The parts of parameters inside this rank's shard, each with its offset in the shard."""
    shards = []
    for member in members:
        start, stop = max(member.offset, own.start), min(member.stop, own.stop)
        if start >= stop:
            continue
        local = master[start - own.start : stop - own.start]
        if stop - start == member.info.numel:
            local = local.view(member.info.shape)
        parameter = nn.Parameter(local)
        shards.append(
            (ParameterShard(member.info, parameter, start - member.offset, stop - member.offset), start - own.start)
        )
    return shards
