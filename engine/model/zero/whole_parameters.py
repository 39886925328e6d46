"""Stage 3 for optimizers that need whole matrices (Muon, Adafactor): every parameter has an owner that steps on it.

At the boundary gradients travel from the shards to the owners, after the update values travel back. Owners are
balanced by size, so a rank holds no more masters and moments than with shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.collectives.shards import ShardGroup
from engine.mesh import Mesh
from engine.model.zero.fully_sharded import FullyShardedReduction, local_part
from engine.model.zero.shards import ParameterShard, owners_of
from engine.parameters import ParameterInfo, ParameterRegistry
from engine.plan import ZeroPlan
from engine.plan.cuts import row_range


class OwnedParametersReduction(FullyShardedReduction):
    """As `FullyShardedReduction`, but `shards` are the whole parameters that this rank owns."""

    def __init__(
        self,
        model: nn.Module,
        registry: ParameterRegistry,
        managed: Sequence[ParameterInfo],
        zero: ZeroPlan,
        mesh: Mesh,
        shard_group: ShardGroup,
        whole_windows: bool = False,
    ) -> None:
        super().__init__(model, registry, managed, zero, mesh, shard_group, whole_windows)
        owner_of = owners_of(managed, registry.shared(), self._group.size)
        self._owners = [owner_of[info.index] for info in managed]
        values = self._to_owners([local_part(parameter) for _, parameter in self.parameters])
        self.shards = [
            ParameterShard(info, nn.Parameter(value), 0, info.numel)
            for (info, _), value in zip(self.parameters, values, strict=True)
            if value is not None
        ]

    @torch.no_grad()
    def finish(self) -> None:
        """Adds what has come since the last time: gradients may be asked for inside a window."""
        if self._whole_windows:
            self._reduce_at_once()
        present = [parameter.grad is not None for _, parameter in self.parameters]
        if not any(present):  # the same on all ranks: FSDP2 reduces on all or on none
            return
        gradients = self._to_owners(
            [local_part(p.grad if p.grad is not None else torch.zeros_like(p)) for _, p in self.parameters]
        )
        for _, parameter in self.parameters:
            parameter.grad = None
        owned = [(gradient, was) for gradient, was in zip(gradients, present, strict=True) if gradient is not None]
        for shard, (gradient, was_present) in zip(self.shards, owned, strict=True):
            if was_present and shard.parameter.grad is not None:
                shard.parameter.grad += gradient
            elif was_present:
                shard.parameter.grad = gradient

    def adopt_gradients(self, indices: set[int]) -> None:
        self._used |= indices & {info.index for info, _ in self.parameters}

    @torch.no_grad()
    def publish(self) -> None:
        super().publish()
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        whole = {shard.info.index: shard.parameter for shard in self.shards}
        for (info, parameter), owner in zip(self.parameters, self._owners, strict=True):
            local = local_part(parameter)
            for peer in range(self._group.size):
                start, stop = row_range(info.shape, peer, self._group.size)
                if start == stop:
                    continue
                if owner == self._group.rank:
                    part = whole[info.index].detach().reshape(-1)[start:stop]
                    if peer == owner:
                        local.copy_(part.view_as(local))
                    else:
                        sends.append((part, peer))
                elif peer == self._group.rank:
                    receives.append((local.view(-1), owner))
        self._group.exchange(sends, receives, "giving parameters back to their shards")

    def _to_owners(self, locals_: Sequence[Tensor]) -> list[Tensor | None]:
        """Whole tensors of the parameters that this rank owns (None for the others), from every rank's rows."""
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        wholes: list[Tensor | None] = []
        for (info, _), owner, local in zip(self.parameters, self._owners, locals_, strict=True):
            local = local.contiguous().view(-1)
            if owner != self._group.rank:
                wholes.append(None)
                if local.numel():
                    sends.append((local, owner))
                continue
            whole = torch.empty(info.numel, dtype=local.dtype, device=local.device)
            for peer in range(self._group.size):
                start, stop = row_range(info.shape, peer, self._group.size)
                if peer == owner:
                    whole[start:stop].copy_(local)
                elif start < stop:
                    receives.append((whole[start:stop], peer))
            wholes.append(whole.view(info.shape))
        self._group.exchange(sends, receives, "collecting whole parameters")
        return wholes
