"""Where flat buckets, groups of blocks and rows are cut: the arithmetic that building and planning share. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from math import prod

ALIGNMENT = 16
"""Elements; shards start at 64-byte boundaries in fp32, as vector instructions like them."""

AGREEMENT_NUMBERS = 20
"""float64 numbers in the one small all-reduce of a step: two for the call, the rest for its values."""


def runs(members: Sequence[tuple[int, Hashable]], limit: int) -> list[list[int]]:
    """Positions of ``members`` (elements, kind), in order, cut into runs of one kind and of at most ``limit`` elements;
    a single member may exceed it."""
    cut: list[list[int]] = []
    filled, kind = 0, None
    for position, (numel, own_kind) in enumerate(members):
        if not cut or own_kind != kind or filled + numel > limit:
            cut.append([])
            filled, kind = 0, own_kind
        cut[-1].append(position)
        filled += numel
    return cut


def padded(numel: int, ranks: int) -> int:
    """The elements of a flat buffer that is cut into equal aligned shards."""
    quantum = ALIGNMENT * ranks if ranks > 1 else 1
    return -(-numel // quantum) * quantum


def group_runs(numels: Sequence[int], group_elements: int) -> list[list[int]]:
    """Positions of consecutive blocks of ``numels`` elements, gathered together until a group holds
    ``group_elements``; blocks that together hold less get no group."""
    groups: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for position, numel in enumerate(numels):
        current.append(position)
        filled += numel
        if filled >= group_elements:
            groups.append(current)
            current, filled = [], 0
    if current and groups:
        groups[-1].extend(current)
    return groups


def is_cut(shape: Sequence[int]) -> bool:
    """Whether stage 3 shards a parameter of this shape: it has a first dimension, and elements."""
    return len(shape) > 0 and 0 not in shape


def chunk_rows(shape: Sequence[int], ranks: int) -> int:
    """Rows of the largest of ``ranks`` shards, as `torch.chunk` cuts them."""
    return -(-shape[0] // ranks)


def row_range(shape: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """The elements of the flattened parameter that FSDP2 keeps on ``rank``: whole rows, as `torch.chunk` cuts them."""
    rows, per_row, chunk = shape[0], prod(shape[1:]), chunk_rows(shape, ranks)
    first, last = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
    return first * per_row, last * per_row


def assign_owners(numels: Sequence[int], ranks: int) -> list[int]:
    """The rank that owns each tensor whole: largest first, each to the rank that holds least so far."""
    load = [0] * ranks
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        owners[index] = min(range(ranks), key=lambda rank: load[rank])
        load[owners[index]] += numels[index]
    return owners


def owner_bounds(numels: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """Bounds of a buffer whose members are sorted by owner, one shard an owner."""
    held = [0] * ranks
    for numel, owner in zip(numels, owners, strict=True):
        held[owner] += numel
    return list(itertools.accumulate(held, initial=0))
