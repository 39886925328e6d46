"""The one small all-reduce of a step: norm, loss, counts and requests together, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.collectives.shards import ShardGroup


class Agreement:
    """Sums named numbers over all ranks, in float64. The sums are the same bits on every rank."""

    def __init__(self, world: ShardGroup, device: torch.device) -> None:
        self._world = world
        self._device = device

    def sum(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """One all-reduce, and the step's one wait for the device."""
        numbers = [
            value.detach().to(self._device, torch.float64).reshape(())
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float64, device=self._device)
            for value in values.values()
        ]
        packed = torch.stack(numbers)
        self._world.all_reduce(packed).wait()
        return dict(zip(values, packed.tolist(), strict=True))

    def common(self, indices: list[int], size: int) -> set[int]:
        """The indices below ``size`` that every rank gave."""
        flags = torch.zeros(size, dtype=torch.float64, device=self._device)
        flags[indices] = 1.0
        self._world.all_reduce(flags).wait()
        return set(torch.nonzero(flags == float(self._world.size)).flatten().tolist())

    def lowest(self, rank_and_index: tuple[int, int] | None) -> tuple[int, int] | None:
        """The lowest (rank, index) that any rank gave, each for itself."""
        flags = torch.zeros(self._world.size, dtype=torch.float64, device=self._device)
        if rank_and_index is not None:
            flags[rank_and_index[0]] = 1.0 + rank_and_index[1]
        self._world.all_reduce(flags).wait()
        given = torch.nonzero(flags).flatten().tolist()
        return (given[0], int(flags[given[0]].item()) - 1) if given else None
