"""Attention over whole sequences, for queries, keys and values of which each rank has a slice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError
from engine.model.sequence_parallel.layout import Layout
from engine.model.sequence_parallel.ring import ring_attention
from engine.model.sequence_parallel.ulysses import gather_heads, gather_sequence
from engine.model.sequence_parallel.visibility import Visibility

SWITCH_OFF = "set sequence_parallel_size and parallel.context_parallel to 1"
Kernel = Callable[..., Tensor]
attend_whole: Kernel = F.scaled_dot_product_attention
"""torch's own, whatever stands in its place while slices are under way."""


@dataclass(frozen=True)
class SlicedAttention:
    """Ulysses over ``sp``, inside it the ring over ``cp``; a group of one rank does nothing."""

    layout: Layout
    cp: ShardGroup
    sp: ShardGroup

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """``query`` (B, heads, N, D), ``key`` and ``value`` (B, groups of heads, N, D) of this rank's N = S / (cp sp)
        tokens -> (B, heads, N, D). ``visibility`` speaks of the whole sequence; ``visibility.mask`` has one row or N.

        Raises EngineError for heads that sp does not divide, for keys of another sequence than the queries', and for
        dropout in a ring, whose blocks would each need the random numbers of the others.
        """
        self._check(query, key, dropout)
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        if self.layout.sp > 1:
            key, value = self._enough_groups(query.shape[1], key, value)
            visibility = replace(visibility, mask=self._rows_of_part(visibility.mask, query))
            query, key, value = gather_sequence((query, key, value), self.sp)
        if self.layout.cp > 1:
            output = ring_attention(query, key, value, visibility, scale, self.layout, self.cp)
        else:
            output = self._whole(query, key, value, visibility, dropout, scale)
        return gather_heads(output, self.sp) if self.layout.sp > 1 else output

    def torch_signature(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """In place of `torch.nn.functional.scaled_dot_product_attention`.

        ``attn_mask`` tells of all S keys (and of this rank's queries, or of any), or of this rank's N keys alike for
        all queries. Raises EngineError for one of N x N, made inside the model, which cannot know what it leaves out.
        """
        if attn_mask is not None and is_causal:
            return attend_whole(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)  # which refuses both
        if query.ndim != 4:
            raise EngineError(
                f"sequence parallel: scaled_dot_product_attention got a query of shape {tuple(query.shape)}; it is "
                "(batch, heads, tokens, width) where sequences are cut"
            )
        if key.shape[1] not in (1, query.shape[1]) and not enable_gqa:
            return attend_whole(query, key, value)  # which refuses the shapes
        mask = None if attn_mask is None else self.whole_mask(attn_mask, query.shape[2])
        return self(query, key, value, Visibility(is_causal, mask=mask), dropout_p, scale)

    def whole_mask(self, mask: Tensor, num_tokens: int) -> Tensor:
        """``mask`` (.., 1 or N, S), with columns gathered where they are this rank's alone, as (B, heads, rows, S)."""
        if mask.requires_grad:
            raise EngineError(
                "sequence parallel: the attention mask asks for a gradient (a learned bias?), which cannot be cut; "
                f"{SWITCH_OFF}"
            )
        mask = mask[(None,) * (4 - mask.ndim)]
        length = num_tokens * self.layout.num_slices
        if mask.shape[-1] == length and mask.shape[-2] in (1, num_tokens):
            return mask
        if mask.shape[-1] == num_tokens and mask.shape[-2] == 1:
            return self.gather(mask, -1, length)
        raise EngineError(
            f"sequence parallel: an attention mask of shape {tuple(mask.shape)} for a slice of {num_tokens} of "
            f"{length} tokens. It must tell of all {length} keys: give it with the batch, (batch, 1, {length}, "
            f"{length}) or (batch, {length}), and make none inside the model; a causal model calls with is_causal=True "
            "and no mask"
        )

    def gather(self, tensor: Tensor, dimension: int, length: int) -> Tensor:
        """The slices of all ranks, in the order of the sequence. Not differentiable."""
        part = _all_gather(tensor, self.sp, dimension)
        if self.layout.cp == 1:
            return part
        places = [self.layout.part_indices(length, rank, tensor.device) for rank in range(self.layout.cp)]
        return _all_gather(part, self.cp, dimension).index_select(dimension, torch.cat(places).argsort())

    def _whole(
        self, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, dropout: float, scale: float
    ) -> Tensor:
        more: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        if visibility.is_simple:
            return attend_whole(query, key, value, None, dropout, visibility.is_causal, scale=scale, **more)
        everything = self.layout.part_indices(query.shape[2], 0, query.device)
        mask = visibility.of(everything, everything)
        assert isinstance(mask, Tensor)
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
        return attend_whole(query, key, value, mask, dropout, scale=scale, **more)

    def _check(self, query: Tensor, key: Tensor, dropout: float) -> None:
        num_heads, sp = query.shape[1], self.layout.sp
        if num_heads % sp:
            fitting = [number for number in range(1, num_heads + 1) if num_heads % number == 0]
            nearest = sorted(fitting, key=lambda number: abs(number - sp))[:2]
            raise EngineError(
                f"sequence_parallel_size: {sp} does not divide the {num_heads} attention heads: {num_heads} = "
                f"{num_heads // sp} x {sp} + {num_heads % sp}. The nearest that fit are "
                f"{' and '.join(map(str, sorted(nearest)))}; parallel.context_parallel takes any number of heads"
            )
        if key.shape[2] != query.shape[2]:
            raise EngineError(
                f"sequence parallel: attention from {query.shape[2]} to {key.shape[2]} tokens of a slice: keys of "
                f"another sequence (cross attention, a cache) are not cut alike; {SWITCH_OFF}"
            )
        if dropout > 0 and self.layout.cp > 1:
            raise EngineError(
                f"parallel.context_parallel: attention dropout {dropout:g} cannot be right in a ring, where every "
                "block would need the random numbers of the others; set the model's attention dropout to 0, or use "
                "sequence_parallel_size, where each rank has whole rows of some heads"
            )

    def _enough_groups(self, num_heads: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values repeated until sp divides their number, where groups of heads share fewer."""
        num_groups = key.shape[1]
        each = num_heads // num_groups
        times = next(t for t in range(1, each + 1) if each % t == 0 and num_groups * t % self.layout.sp == 0)
        if times == 1:
            return key, value
        return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)

    def _rows_of_part(self, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """What the mask says to the queries that this rank has after the exchange: all of its part, for its heads."""
        if mask is None:
            return None
        if mask.shape[-2] != 1:
            mask = _all_gather(mask, self.sp, -2)
        if mask.shape[1] == query.shape[1] > 1:
            mask = mask.chunk(self.layout.sp, dim=1)[self.layout.sp_rank]
        return mask


def _all_gather(tensor: Tensor, group: ShardGroup, dimension: int) -> Tensor:
    """The ranks' tensors, of one shape, side by side along ``dimension``."""
    if group.size == 1:
        return tensor
    is_bool = tensor.dtype == torch.bool
    own = (tensor.to(torch.uint8) if is_bool else tensor.detach()).reshape(-1)
    flat = torch.empty(group.size * own.numel(), dtype=own.dtype, device=own.device)
    bounds = group.even_bounds(flat.numel())
    flat[bounds[group.rank] : bounds[group.rank + 1]].copy_(own)
    group.all_gather(flat, bounds, "gathering attention masks").wait()
    joined = torch.cat([part.view(tensor.shape) for part in flat.chunk(group.size)], dim=dimension)
    return joined.bool() if is_bool else joined
