"""Parameters that several pipeline ranks hold: tied embeddings, and what stands on both ends of the layers.

Each of them updates its own copy with the same gradient, so the copies stay equal to the bit: gradients are summed over
the holders, in the order of their ranks, after the data-parallel reduction. All holders keep such parameters in buckets
(or rows) of one layout, so the sums need only the pieces that a rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.contracts import Reduction
from engine.mesh import Mesh
from engine.model.zero.shards import ParameterShard, sum_of_squares


class SharedAcrossStages:
    """A `Reduction` around that of the data-parallel axis: the same but for what is written out here.

    ``holders``: registry index -> the pipeline ranks that hold the parameter, of those that more than one does.
    """

    def __init__(
        self,
        inner: Reduction,
        holders: Mapping[int, tuple[int, ...]],
        frozen: Sequence[ParameterShard],
        mesh: Mesh,
        ledger: Ledger,
    ) -> None:
        self._inner, self._holders = inner, holders
        self._group = ShardGroup.of(mesh, "pp", ledger)
        self._replicas = mesh.degrees["dp_replicate"]
        self._shards = [shard for shard in inner.shards if shard.info.index in holders]
        self._is_summed = False
        self._equalise([*self._shards, *(shard for shard in frozen if shard.info.index in holders)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _by_holders(self, shards: Sequence[ParameterShard]) -> list[tuple[tuple[int, ...], list[ParameterShard]]]:
        """Shards of the same holders together, in an order that all ranks share."""
        ordered = sorted(shards, key=lambda shard: (shard.info.index, shard.start))
        sets = sorted({self._holders[shard.info.index] for shard in shards})
        return [(ranks, [s for s in ordered if self._holders[s.info.index] == ranks]) for ranks in sets]

    @torch.no_grad()
    def _equalise(self, shards: Sequence[ParameterShard]) -> None:
        """All holders begin with the values of the first: a copy was perhaps filled under another name."""
        for ranks, together in self._by_holders(shards):
            for shard in together:
                values = shard.parameter.detach().contiguous()
                received = torch.empty_like(values)
                first = ranks[0] == self._group.rank
                sends = [(values, rank) for rank in ranks[1:]] if first else []
                self._group.exchange(sends, [] if first else [(received, ranks[0])], "making shared parameters equal")
                if not first:
                    shard.parameter.data.copy_(received)
        self._inner.publish()

    @torch.no_grad()
    def finish(self) -> None:
        """The data-parallel reduction, then the sum over the holders; once in a window."""
        self._inner.finish()
        if self._is_summed:
            return
        self._is_summed = True
        untouched, touched_anywhere = set(self._inner.untouched()), set()
        for ranks, together in self._by_holders(self._shards):
            gradients = [s.parameter.grad if s.parameter.grad is not None else torch.zeros_like(s.parameter)
                         for s in together]  # fmt: skip
            marks = [float(shard.info.index not in untouched) for shard in together]
            mine = torch.cat([*(g.reshape(-1).float() for g in gradients), torch.tensor(marks).to(gradients[0].device)])
            total = self._sum(mine, ranks)
            for index, shard in enumerate(together):
                if total[len(total) - len(together) + index] > 0:
                    touched_anywhere.add(shard.info.index)
            position = 0
            for shard, gradient in zip(together, gradients, strict=True):
                own = total[position : position + gradient.numel()].view(gradient.shape)
                position += gradient.numel()
                if shard.info.index in touched_anywhere:
                    shard.parameter.grad = gradient.copy_(own)
        self._inner.adopt_gradients(touched_anywhere)

    def _sum(self, mine: Tensor, ranks: tuple[int, ...]) -> Tensor:
        others = {rank: torch.empty_like(mine) for rank in ranks if rank != self._group.rank}
        self._group.exchange(
            [(mine, rank) for rank in others],
            [(buffer, rank) for rank, buffer in others.items()],
            "summing gradients of shared parameters",
        )
        parts = [mine if rank == self._group.rank else others[rank] for rank in ranks]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    @torch.no_grad()
    def sum_of_squares(self, exact: bool = False) -> Tensor:
        """Of the holders of a parameter each counts its part, so that it is counted once."""
        total = self._inner.sum_of_squares(exact)
        surplus = torch.zeros_like(total)
        for shard in self._shards:
            if shard.parameter.grad is not None:
                number = len(self._holders[shard.info.index])
                squares = sum_of_squares(shard.parameter.grad.reshape(-1), exact)
                surplus += squares * ((number - 1) / number / shard.info.num_copies / self._replicas)
        return torch.where(total.isfinite(), total - surplus, total)

    def zero_gradients(self) -> None:
        self._is_summed = False
        self._inner.zero_gradients()
