"""The collectives that FSDP2 calls at stage 3: counted on every backend, point-to-point on gloo.

FSDP2 takes any object with ``allocate`` and ``__call__``
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, `set_custom_all_gather`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.collectives.shards import ShardGroup


class _Pool:
    """Buffers that are kept on the CPU, where a fresh page costs more than a copy; elsewhere the caching allocator
    does this already. A size has ``depth`` buffers, handed out in turn: FSDP2 uses at most two of a kind at once."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._rings: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = math.prod(size)
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        ring = self._rings.setdefault((numel, dtype), [])
        if len(ring) < self._depth:
            ring.append(torch.empty(numel, dtype=dtype))
        else:
            ring.append(ring.pop(0))
        return ring[-1]


class AllGather:
    """Fills ``output_tensor`` (local, world times ``input_tensor``) with every rank's part in rank order."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._pool = _Pool(depth=2)
        self._what = "gathering parameters"

    def of(self, unit: str) -> AllGather:
        """The same, and the same buffers, for what FSDP2 gathers together as ``unit``."""
        named = copy.copy(self)
        named._what = f"gathering {unit}"
        return named

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._pool.take(size, dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        shards = self._group if size == self._group.size else ShardGroup(group, self._group.axis, self._group.ledger)
        bounds = shards.even_bounds(output_tensor.numel())
        own = output_tensor[bounds[rank] : bounds[rank + 1]]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        shards.all_gather(output_tensor, bounds, self._what).wait()
        return None


class ReduceScatter:
    """Leaves the sum of this rank's part of ``input_tensor`` in ``output_tensor`` (local)."""

    def __init__(self, group: ShardGroup, predivide_factor: float = 1.0) -> None:
        self._group = group
        self._predivide_factor = predivide_factor
        self._pool = _Pool(depth=1)
        self._what = "reducing gradients"

    def of(self, unit: str) -> ReduceScatter:
        """The same, and the same buffers, for ``unit``."""
        named = copy.copy(self)
        named._what = f"reducing gradients of {unit}"
        return named

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # the output outlives the call (gradients are views of it), only the input is taken from the pool: FSDP2
        # allocates input and output in turn, and the output is the smaller by the number of ranks
        numel = math.prod(size)
        if self._input_numel is not None and numel * self._group.size == self._input_numel:
            self._input_numel = None
            return torch.empty(numel, dtype=dtype, device=device)
        self._input_numel = numel
        return self._pool.take(size, dtype, device)

    _input_numel: int | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._predivide_factor != 1.0:
            input_tensor.div_(self._predivide_factor)
        bounds = self._group.even_bounds(input_tensor.numel())
        self._group.reduce_scatter(input_tensor, bounds, self._what).wait()
        output_tensor.copy_(input_tensor[bounds[self._group.rank] : bounds[self._group.rank + 1]])
        return None
