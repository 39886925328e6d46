"""Squared norms of whole parameters from those of the pieces that ranks hold: what LAMB's trust ratios need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.collectives.shards import ShardGroup
from engine.mesh import Mesh
from engine.parameters import ParameterRegistry


class NormSum:
    """Sums over the shards of the data-parallel ranks and over the parts of the tp ranks.

    Called by all ranks with one vector (float32): rows of one entry a parameter, in registry order. What several tp
    ranks hold alike is taken from the first.
    """

    def __init__(self, mesh: Mesh, registry: ParameterRegistry, groups: Sequence[ShardGroup]) -> None:
        self._groups, self._device = groups, mesh.device
        counted = [float(not info.is_copy) for info in registry.infos]
        self._counted = torch.tensor(counted) if 0.0 in counted else None

    def __call__(self, squares: Tensor) -> Tensor:
        if self._counted is not None:
            rows = squares.view(-1, self._counted.numel())
            squares = torch.where(self._counted.to(rows.device) > 0.0, rows, 0.0).view(-1)
        for group in self._groups:
            squares = group.sum(squares, device=self._device)
        return squares
