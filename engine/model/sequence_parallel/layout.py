"""Which tokens of a sequence lie on which rank.

A sequence of S tokens is cut over cp, each part then over sp. Over cp > 1 it is cut into 2 cp chunks, of which rank c
holds chunks c and 2 cp - 1 - c: under a causal mask every rank then has the same work (Llama 3, arXiv 2407.21783,
section 3.3.2). A rank's tokens stay in ascending order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.plan.sequence_parallel import length_unit


@dataclass(frozen=True)
class Layout:
    """This rank's place ``cp_rank`` of ``cp`` and ``sp_rank`` of ``sp``."""

    cp: int
    sp: int
    cp_rank: int
    sp_rank: int

    @property
    def num_slices(self) -> int:
        return self.cp * self.sp

    @property
    def unit(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return length_unit(self.cp, self.sp)

    def slice_indices(self, length: int, device: torch.device | None = None) -> Tensor:
        """Where this rank's tokens lie in a sequence of ``length``: (length / (cp sp),), ascending."""
        part = self.part_indices(length, self.cp_rank, device)
        return part.chunk(self.sp)[self.sp_rank]

    def part_indices(self, length: int, cp_rank: int, device: torch.device | None = None) -> Tensor:
        """Where the tokens of a rank of the ring lie: (length / cp,), ascending."""
        return _part_indices(length, self.cp, cp_rank, device or torch.device("cpu"))


@functools.lru_cache(maxsize=64)
def _part_indices(length: int, cp: int, cp_rank: int, device: torch.device) -> Tensor:
    everything = torch.arange(length, device=device)
    if cp == 1:
        return everything
    chunks = everything.chunk(2 * cp)
    return torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])
