"""Collectives on activations, with their gradients: what layers that are split over ranks need around them.

An activation is *whole* (equal on all ranks of the group) or *cut* along one dimension; a gradient is then whole or cut
in the same way. Layers that read a whole activation each with their own weights give *partial* sums: the sum over the
ranks is the true value.

| function | forward | backward |
|---|---|---|
| `copied` | whole -> whole | partial -> whole: all-reduce |
| `summed` | partial -> whole: all-reduce | whole -> whole |
| `joined` | cut -> whole: all-gather | whole -> cut |
| `parted` | whole -> cut | cut -> whole: all-gather |
| `joined_for_parts` | cut -> whole: all-gather | partial -> cut: reduce-scatter |
| `summed_to_parts` | partial -> cut: reduce-scatter | cut -> whole: all-gather |

The first two are f and g of Megatron-LM (https://arxiv.org/abs/1909.08053, section 3). The last two take their place
where activations between layers are cut along the sequence (https://arxiv.org/abs/2205.05198, section 4.2.2).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from engine.collectives.shards import ShardGroup
from engine.cut import Cut


def copied(x: Tensor, group: ShardGroup, what: str) -> Tensor:
    """``x``, whole, for layers whose weights differ between the ranks; their gradients of it are summed."""
    y: Tensor = _Copied.apply(x, group, what)
    return y


def summed(x: Tensor, group: ShardGroup, what: str) -> Tensor:
    """The sum of the ranks' partial ``x``, whole."""
    y: Tensor = _Summed.apply(x, group, what)
    return y


def joined(x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int = -1) -> Tensor:
    """The whole of what is cut along ``dimension`` as ``cut`` says."""
    y: Tensor = _Joined.apply(x, cut, group, what, dimension)
    return y


def parted(x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int = -1) -> Tensor:
    """This rank's part of a whole ``x``."""
    y: Tensor = _Parted.apply(x, cut, group, what, dimension)
    return y


def joined_for_parts(x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int) -> Tensor:
    """The whole of what is cut, for layers whose weights differ between the ranks."""
    y: Tensor = _JoinedForParts.apply(x, cut, group, what, dimension)
    return y


def summed_to_parts(x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int) -> Tensor:
    """This rank's part of the sum of the ranks' partial ``x``."""
    y: Tensor = _SummedToParts.apply(x, cut, group, what, dimension)
    return y


class _Copied(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: ShardGroup, what: str) -> Tensor:
        context.group, context.what = group, f"summing gradients before {what}"
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _sum(gradient, context.group, context.what), None, None


class _Summed(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: ShardGroup, what: str) -> Tensor:
        return _sum(x, group, f"summing the output of {what}")

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class _Joined(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int) -> Tensor:
        context.cut, context.dimension = cut, dimension
        return join(x, cut, group, f"joining the output of {what}", dimension)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return context.cut.part(gradient, context.dimension), None, None, None, None


class _Parted(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int) -> Tensor:
        context.cut, context.group, context.dimension = cut, group, dimension
        context.what = f"joining gradients before {what}"
        return cut.part(x, dimension)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return join(gradient, context.cut, context.group, context.what, context.dimension), None, None, None, None


class _JoinedForParts(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int) -> Tensor:
        context.cut, context.group, context.dimension = cut, group, dimension
        context.what = f"summing gradients before {what}"
        return join(x, cut, group, f"joining the output of {what}", dimension)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        part = _sum_to_part(gradient, context.cut, context.group, context.what, context.dimension)
        return part, None, None, None, None


class _SummedToParts(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int) -> Tensor:
        context.cut, context.group, context.dimension = cut, group, dimension
        context.what = f"joining gradients before {what}"
        return _sum_to_part(x, cut, group, f"summing the output of {what}", dimension)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return join(gradient, context.cut, context.group, context.what, context.dimension), None, None, None, None


def _sum_to_part(x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int) -> Tensor:
    parts = [replace(cut, rank=rank).part(x, dimension) for rank in range(group.size)]
    bounds = list(itertools.accumulate((part.numel() for part in parts), initial=0))
    flat = torch.cat([part.reshape(-1) for part in parts])
    group.reduce_scatter(flat, bounds, what).wait()
    return flat[bounds[group.rank] : bounds[group.rank + 1]].view(parts[group.rank].shape).clone()


def _sum(x: Tensor, group: ShardGroup, what: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, what).wait()
    return total


@torch.no_grad()
def join(x: Tensor, cut: Cut, group: ShardGroup, what: str, dimension: int = -1) -> Tensor:
    """As `joined`, without a gradient."""
    shapes = []
    for rank in range(group.size):
        shape = list(x.shape)
        shape[dimension] = cut.extent(rank)
        shapes.append(shape)
    bounds = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    flat = torch.empty(bounds[-1], dtype=x.dtype, device=x.device)
    flat[bounds[group.rank] : bounds[group.rank + 1]] = x.reshape(-1)
    group.all_gather(flat, bounds, what).wait()
    return cut.join([flat[bounds[r] : bounds[r + 1]].view(shapes[r]) for r in range(group.size)], dimension)
