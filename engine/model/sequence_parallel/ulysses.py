"""Ulysses (arXiv 2309.14509): slices of all heads become whole sequences of some heads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.collectives.shards import ShardGroup


def gather_sequence(tensors: Sequence[Tensor], group: ShardGroup, what: str = "exchanging heads") -> tuple[Tensor, ...]:
    """Each (B, heads, N, D), N tokens of all heads, becomes (B, heads / sp, sp N, D): all tokens of this rank's heads.

    ``sp`` divides the heads of every tensor; the tensors, of one dtype, travel in one all-to-all. Differentiable.
    """
    return _Exchange.apply(group, what, True, *tensors)


def gather_heads(tensor: Tensor, group: ShardGroup, what: str = "exchanging heads") -> Tensor:
    """The way back: (B, heads / sp, sp N, D) becomes (B, heads, N, D). Differentiable."""
    return _Exchange.apply(group, what, False, tensor)[0]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ShardGroup, what: str, to_sequence: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.what, ctx.to_sequence = group, what, to_sequence
        return _exchange(tensors, group, to_sequence, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exchanged = _exchange(gradients, ctx.group, not ctx.to_sequence, f"{ctx.what}, backward")
        return (None, None, None, *exchanged)


def _exchange(tensors: Sequence[Tensor], group: ShardGroup, to_sequence: bool, what: str) -> tuple[Tensor, ...]:
    """One all-to-all of all ``tensors``: rows of a flat buffer, one a rank."""
    size = group.size
    rows = [_rows(tensor, size, to_sequence) for tensor in tensors]
    outgoing = torch.cat([row.reshape(size, -1) for row in rows], dim=1)
    incoming = torch.empty_like(outgoing)
    group.all_to_all(outgoing, incoming, what).wait()
    arrived = incoming.split([row[0].numel() for row in rows], dim=1)
    return tuple(_joined(part.reshape(row.shape), to_sequence) for part, row in zip(arrived, rows, strict=True))


def _rows(tensor: Tensor, size: int, to_sequence: bool) -> Tensor:
    """What goes to each rank, (sp, B, heads / sp, N, D): its heads, or its tokens."""
    dimension = 1 if to_sequence else 2
    return tensor.unflatten(dimension, (size, -1)).movedim(dimension, 0)


def _joined(rows: Tensor, to_sequence: bool) -> Tensor:
    """What came from each rank, (sp, B, heads / sp, N, D), put together: its tokens of our heads, or its heads."""
    dimension = 2 if to_sequence else 1
    return rows.movedim(0, dimension).flatten(dimension, dimension + 1)
