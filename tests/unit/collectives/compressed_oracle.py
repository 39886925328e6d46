"""The 1-bit all-reduce of all ranks in one process, as slow and plain as its definition (float64)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def sign(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype)


@dataclass
class SlowAllReduce:
    """``call`` takes one tensor a rank and returns what all of them get. Errors: one list entry a rank.

    ``counts_padding`` is DeepSpeed's way; else pads are never anything but zero.
    """

    num_ranks: int
    numel: int
    segments: list[int] | None = None
    mask: Tensor | None = None
    l1: bool = False
    counts_padding: bool = False
    errors: list[Tensor] = field(default_factory=list)
    server_errors: list[Tensor] = field(default_factory=list)
    worker_scales: list[list[float]] = field(default_factory=list)
    server_scales: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        quantum = self.num_ranks * (math.lcm(self.num_ranks, 8) if self.counts_padding else 8)
        self.padded = -(-self.numel // quantum) * quantum
        self.chunk = self.padded // self.num_ranks
        self.errors = [torch.zeros(self.padded, dtype=torch.float64) for _ in range(self.num_ranks)]
        self.server_errors = [torch.zeros(self.chunk, dtype=torch.float64) for _ in range(self.num_ranks)]
        self.counted = torch.zeros(self.padded, dtype=torch.bool)
        self.counted[: self.padded if self.counts_padding else self.numel] = True
        if self.mask is not None:
            self.counted[: self.numel] &= self.mask.bool()
        self.segment_of = torch.repeat_interleave(
            torch.arange(len(self.segments or [1])), torch.tensor(self.segments or [self.numel])
        )
        last = self.segment_of[-1:].expand(self.padded - self.numel)
        self.segment_of = torch.cat([self.segment_of, last])

    def compress(self, y: Tensor, first: int) -> tuple[Tensor, Tensor, list[float]]:
        """q and the new error of ``y``, which begins at element ``first`` of the whole."""
        q = torch.zeros_like(y)
        scales = []
        where = self.segment_of[first : first + y.numel()]
        counted = self.counted[first : first + y.numel()]
        for segment in where.unique():
            chosen = (where == segment) & counted
            part = y[chosen]
            if part.numel() == 0:
                continue
            scale = part.abs().mean() if self.l1 else part.square().mean().sqrt()
            scales.append(scale.item())
            q[chosen] = scale * sign(part)
        return q, y - q, scales

    def call(self, xs: list[Tensor]) -> Tensor:
        sent, self.worker_scales, self.server_scales = [], [], []
        for rank, x in enumerate(xs):
            y = self.errors[rank].clone()
            y[: self.numel] += x.double()
            y[~self.counted] = 0.0
            q, self.errors[rank], scales = self.compress(y, 0)
            sent.append(q)
            self.worker_scales.append(scales)
        result = torch.zeros(self.padded, dtype=torch.float64)
        for rank in range(self.num_ranks):
            span = slice(rank * self.chunk, (rank + 1) * self.chunk)
            z = sum(q[span] for q in sent) / self.num_ranks + self.server_errors[rank]
            result[span], self.server_errors[rank], scales = self.compress(z, span.start)
            self.server_scales.append(scales)
        return result[: self.numel]
