"""`DistributedAttention`: Ulysses (arXiv 2309.14509) as a module, for models that cut their sequences themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError
from engine.model.sequence_parallel.ulysses import gather_heads, gather_sequence
from engine.plan.sequence_parallel import heads_problem

_DIVIDED, _JOINED = 1, 2
"""Where the functions of ulysses.py have heads and tokens."""


class DistributedAttention(nn.Module):
    """Attention of this rank's heads over whole sequences, for queries, keys and values of all heads and a slice.

    Args:
        local_attention: called with queries, keys and values of the whole sequence and of this rank's heads, in the
            layout of those that came, and with whatever else `forward` got.
        sequence_process_group: its ranks hold the slices of one sequence, in order. None: all ranks.
        scatter_idx: the dimension that is divided over the ranks: the heads, or heads and width in one.
        gather_idx: the dimension that is put together: the sequence.
        sp_stream: without effect; the three tensors travel in one exchange.
        num_kv_heads: without effect; the tensors tell.

    The number of heads, and that of keys and values, must be divisible by the size of the group. Bytes are counted in
    ``ledger``, not in the engine's reports. Whoever uses it cuts batches, positions and labels; beside
    `sequence_parallel_size`, with which the engine does all that, it is refused.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: dist.ProcessGroup | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.ledger = Ledger()
        self._group: ShardGroup | None = None

    @property
    def group(self) -> ShardGroup:
        if self._group is None:
            is_alone = self.spg is None and not dist.is_initialized()
            self._group = ShardGroup(None if is_alone else self.spg or dist.group.WORLD, "sp", self.ledger)
        return self._group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """``query``, ``key``, ``value``: 4-dim, such as (batch, N, heads, width), or 3-dim with heads and width in one,
        N = S / ranks tokens of each sequence. The result is the slice of what ``local_attention`` returns for all S.

        ``rotary_pos_emb``: cosines and sines of all S positions, (batch or 1, S, 1, rotated width), with which queries
        and keys are turned before ``local_attention``.

        Raises EngineError for heads that the ranks cannot share, for a batch dimension that is divided or put together,
        and for tensors of other dimensions.
        """
        if self.group.size == 1:
            exchanged: Sequence[Tensor] = [self._standing(tensor) for tensor in (query, key, value)]
        else:
            self._check(query, key, value, batch_dim_idx)
            exchanged = gather_sequence([self._standing(tensor) for tensor in (query, key, value)], self.group)
        if rotary_pos_emb is not None:
            cosines, sines = (part.permute(0, 2, 1, 3) for part in rotary_pos_emb)
            turned = [_turned(tensor, cosines, sines) for tensor in exchanged[:2]]
            exchanged = [*turned, exchanged[2]]
        output = self.local_attn(*(self._as_given(tensor, query.ndim) for tensor in exchanged), *args, **kwargs)
        if self.group.size == 1:
            return output
        return self._as_given(gather_heads(self._standing(output).contiguous(), self.group), output.ndim)

    def _standing(self, tensor: Tensor) -> Tensor:
        """(other, divided, put together, width): the layout of ulysses.py."""
        standing = tensor.movedim((self.scatter_idx, self.gather_idx), (_DIVIDED, _JOINED))
        return standing if standing.ndim == 4 else standing.unsqueeze(-1)

    def _as_given(self, tensor: Tensor, num_dimensions: int) -> Tensor:
        tensor = tensor if num_dimensions == 4 else tensor.squeeze(-1)
        return tensor.movedim((_DIVIDED, _JOINED), (self.scatter_idx, self.gather_idx))

    def _check(self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.ndim not in (3, 4):
                raise EngineError(f"DistributedAttention: {name} has shape {tuple(tensor.shape)}; 3 or 4 dimensions go")
            if wrong := heads_problem(tensor.shape[self.scatter_idx], self.group.size, 1):
                raise EngineError(f"DistributedAttention: {name} of shape {tuple(tensor.shape)}: {wrong[0]}")
        exchanged = {index % query.ndim for index in (self.scatter_idx, self.gather_idx)}
        if len(exchanged) == 1 or batch_dim_idx % query.ndim in exchanged:
            raise EngineError(
                f"DistributedAttention: scatter_idx {self.scatter_idx}, gather_idx {self.gather_idx} and batch_dim_idx "
                f"{batch_dim_idx} must be three dimensions of {query.ndim}"
            )


def _turned(tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) on the first ``cosines.shape[-1]`` features, by halves."""
    rotated, rest = tensor[..., : cosines.shape[-1]], tensor[..., cosines.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat((rotated * cosines + torch.cat((-second, first), dim=-1) * sines, rest), dim=-1)
