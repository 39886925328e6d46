"""How one tensor lies over the ranks of an axis that splits layers: which of its elements each rank holds.

A tensor is cut along one dimension. Fused outputs (query, key and value in one matrix) are several segments, each of
which is cut by itself, so that a rank gets its heads of all three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int, int]
"""(start in the local tensor, start in the global one, length), along the dimension that is cut."""


@dataclass(frozen=True)
class Cut:
    """Of a tensor of ``global_shape``, each of the ``segments`` (their sizes along ``dimension``; the sum is the
    extent) is cut into ``size`` parts; this is rank ``rank``'s.

    A segment that ``size`` does not divide is cut as `torch.chunk` cuts: the first parts are larger.
    """

    global_shape: tuple[int, ...]
    dimension: int
    segments: tuple[int, ...]
    size: int
    rank: int

    def ranges(self, rank: int | None = None) -> Iterator[Range]:
        """What ``rank`` (default: this one) holds, one entry a segment."""
        rank = self.rank if rank is None else rank
        local = first = 0
        for extent in self.segments:
            part = -(-extent // self.size)
            start, stop = min(rank * part, extent), min((rank + 1) * part, extent)
            yield local, first + start, stop - start
            local += stop - start
            first += extent

    def extent(self, rank: int | None = None) -> int:
        """How much ``rank`` holds along the dimension."""
        return sum(length for _, _, length in self.ranges(rank))

    @property
    def shape(self) -> tuple[int, ...]:
        """What this rank's part looks like."""
        return (*self.global_shape[: self.dimension], self.extent(), *self.global_shape[self.dimension + 1 :])

    @property
    def is_even(self) -> bool:
        """Whether every rank holds equally much."""
        return all(extent % self.size == 0 for extent in self.segments)

    def part(self, whole: Tensor, dimension: int | None = None) -> Tensor:
        """This rank's part of ``whole``, a copy; ``dimension``: the one that is cut, where it is another there."""
        dimension = self.dimension if dimension is None else dimension
        return torch.cat([whole.narrow(dimension, start, length) for _, start, length in self.ranges()], dimension)

    def join(self, parts: Sequence[Tensor], dimension: int | None = None) -> Tensor:
        """The whole tensor from the parts of all ranks, in rank order."""
        dimension = self.dimension if dimension is None else dimension
        of_rank = [list(self.ranges(rank)) for rank in range(self.size)]
        pieces = []
        for segment in range(len(self.segments)):
            for part, ranges in zip(parts, of_rank, strict=True):
                local, _, length = ranges[segment]
                pieces.append(part.narrow(dimension, local, length))
        return torch.cat(pieces, dimension)

    def boxes(self, offset: int, size: int) -> Iterator[Range]:
        """The elements ``[offset, offset + size)`` of this rank's part along the dimension, segment by segment: where
        they begin in that range, where they lie in the whole, how many."""
        for local, start, length in self.ranges():
            low, high = max(offset, local), min(offset + size, local + length)
            if low < high:
                yield low - offset, start + low - local, high - low
