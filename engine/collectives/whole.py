"""Whole tensors from the pieces that the ranks hold: any number of them in one exchange of bytes.

An object all-gather says who holds what, one all-gather of bytes brings it, so values keep every bit and any dtype.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.collectives.shards import ShardGroup
from engine.collectives.stall import watch
from engine.cut import Cut

_ALIGNMENT = 16
"""Bytes; every piece begins where any dtype may be read."""


@dataclass(frozen=True)
class Piece:
    """The elements ``[start, start + values.numel())`` of the flattened tensor ``key`` of shape ``shape``."""

    key: Hashable
    shape: tuple[int, ...]
    start: int
    values: Tensor


@torch.no_grad()
def gather_whole(pieces: Sequence[Piece], group: ShardGroup, device: torch.device) -> dict[Hashable, Tensor]:
    """Every tensor of which some rank of ``group`` holds a piece, whole, on every rank; copies.

    All ranks of the group call it. A tensor of which no rank holds all the elements comes with zeros there.
    """
    mine = [(p.key, p.shape, p.start, p.values.numel(), p.values.dtype) for p in pieces]
    by_rank = [mine]
    if group.size > 1:
        by_rank = [[]] * group.size
        with watch.wait(group.ticket("asking who holds what")):
            dist.all_gather_object(by_rank, mine, group=group.group)
    bounds = [0]
    places = []
    for theirs in by_rank:
        position = bounds[-1]
        for key, shape, start, numel, dtype in theirs:
            places.append((key, shape, start, numel, dtype, position))
            position += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        bounds.append(position)
    flat = torch.zeros(bounds[-1], dtype=torch.uint8, device=device)
    position = bounds[group.rank]
    for piece in pieces:
        size = piece.values.numel() * piece.values.dtype.itemsize
        flat[position : position + size] = piece.values.detach().to(device).contiguous().view(-1).view(torch.uint8)
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    group.all_gather(flat, bounds, "gathering whole tensors").wait()
    whole: dict[Hashable, Tensor] = {}
    for key, shape, start, numel, dtype, position in places:
        target = whole.setdefault(key, torch.zeros(shape, dtype=dtype, device=device))
        values = flat[position : position + numel * dtype.itemsize].view(dtype)
        target.view(-1)[start : start + numel] = values
    return whole


@torch.no_grad()
def join_parts(
    parts: Mapping[Any, Tensor], cuts: Mapping[Any, Cut], group: ShardGroup, device: torch.device
) -> dict[Any, Tensor]:
    """``parts`` with those in ``cuts`` joined from what the ranks of ``group`` hold. All ranks call it alike."""
    if group.size == 1:
        return dict(parts)
    mine = [Piece((key, group.rank), tuple(parts[key].shape), 0, parts[key]) for key in cuts]
    held = gather_whole(mine, group, device) if mine else {}
    joined = {key: cut.join([held[key, rank] for rank in range(group.size)]) for key, cut in cuts.items()}
    return {key: joined.get(key, part) for key, part in parts.items()}
