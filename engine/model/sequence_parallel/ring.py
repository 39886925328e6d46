"""Ring attention (arXiv 2310.01889): keys and values pass from rank to rank, each adds its block of the softmax.

A rank holds two chunks of the sequence (layout.py), and under a causal mask half of every foreign block is nobody's
work: of a rank before it, it needs the first chunk alone; of one behind it, its own second chunk alone needs anything.
Why not torch's own context parallel: docs/adr/0014-ring-attention-by-hand.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.collectives.shards import Pending, ShardGroup
from engine.model.sequence_parallel.block_attention import Mask, block_backward, block_forward, join
from engine.model.sequence_parallel.layout import Layout
from engine.model.sequence_parallel.visibility import Visibility


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float, layout: Layout, group: ShardGroup
) -> Tensor:
    """``query`` (B, heads, N, D), ``key`` and ``value`` (B, groups of heads, N, D), all local: the N = S / cp tokens of
    this rank. Returns the attention of its queries over the whole sequence, (B, heads, N, D). Differentiable."""
    return _Ring.apply(query, key, value, visibility, scale, layout, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility,
        scale: float,
        layout: Layout,
        group: ShardGroup,
    ) -> Tensor:
        blocks = _Blocks(query, key, visibility, layout)
        shape = (*query.shape[:-1], value.shape[-1])
        output = torch.zeros(shape, dtype=torch.float32, device=query.device)
        log_sum = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        held = _pack(key, value)
        for step in range(group.size):
            pending, arriving = _pass_on(held, group, step, "passing on keys and values")
            source = (group.rank - step) % group.size
            their_key, their_value = _unpack(held, key, value)
            for rows, columns, mask in blocks.with_keys_of(source):
                found = block_forward(
                    query[:, :, rows],
                    blocks.expand(their_key[:, :, columns]),
                    blocks.expand(their_value[:, :, columns]),
                    mask,
                    scale,
                )
                output[:, :, rows], log_sum[:, :, rows] = join(output[:, :, rows], log_sum[:, :, rows], *found)
            if pending is not None:
                pending.wait()
                held = arriving
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.rest = visibility, scale, layout, group
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        visibility, scale, layout, group = ctx.rest
        (gradient,) = gradients
        blocks = _Blocks(query, key, visibility, layout)
        to_query = torch.zeros_like(query, dtype=torch.float32)
        held = _pack(key, value)
        # what all ranks so far have added to the gradients of the keys and values that this rank holds
        sums = torch.zeros_like(held, dtype=torch.float32)
        for step in range(group.size):
            pending, arriving = _pass_on(held, group, step, "passing on keys and values, backward")
            source = (group.rank - step) % group.size
            their_key, their_value = _unpack(held, key, value)
            own = torch.zeros_like(sums)
            own_key, own_value = _unpack(own, key, value)
            for rows, columns, mask in blocks.with_keys_of(source):
                found = block_backward(
                    gradient[:, :, rows],
                    query[:, :, rows],
                    blocks.expand(their_key[:, :, columns]),
                    blocks.expand(their_value[:, :, columns]),
                    output[:, :, rows],
                    log_sum[:, :, rows],
                    mask,
                    scale,
                )
                to_query[:, :, rows] += found[0]
                own_key[:, :, columns] += blocks.reduce(found[1])
                own_value[:, :, columns] += blocks.reduce(found[2])
            sums += own
            # after the last step this brings the sums home
            passed = torch.empty_like(sums)
            group.rotate(sums, passed, "passing on gradients of keys and values").wait()
            sums = passed
            if pending is not None:
                pending.wait()
                held = arriving
        to_key, to_value = _unpack(sums, key, value)
        own_gradients = to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)
        return (*own_gradients, None, None, None, None)


class _Blocks:
    """Which of this rank's queries meet which of another's keys, and under what mask."""

    def __init__(self, query: Tensor, key: Tensor, visibility: Visibility, layout: Layout) -> None:
        self.num_heads, self.num_groups, self.num_tokens = query.shape[1], key.shape[1], query.shape[2]
        self.visibility, self.layout, self.device = visibility, layout, query.device

    def with_keys_of(self, source: int) -> Iterator[tuple[slice, slice, Mask]]:
        """(rows of our queries, columns of their keys, mask); nothing where all is hidden."""
        everything, half = slice(0, self.num_tokens), self.num_tokens // 2
        own = self.layout.cp_rank
        if not self.visibility.is_simple:
            length = self.num_tokens * self.layout.cp
            queries = self.layout.part_indices(length, own, self.device)
            keys = self.layout.part_indices(length, source, self.device)
            yield everything, everything, self.visibility.of(queries, keys)
        elif not self.visibility.is_causal:
            yield everything, everything, None
        elif source == own:
            yield everything, everything, "causal"  # tokens are in ascending order
        elif source < own:
            yield everything, slice(0, half), None
        else:
            yield slice(half, self.num_tokens), everything, None

    def expand(self, tensor: Tensor) -> Tensor:
        """One for every head, of keys or values that groups of heads share."""
        times = self.num_heads // tensor.shape[1]
        return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)

    def reduce(self, gradient: Tensor) -> Tensor:
        """The way back: summed over the heads of each group."""
        if self.num_groups == self.num_heads:
            return gradient
        return gradient.unflatten(1, (self.num_groups, -1)).sum(dim=2)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(flat: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a flat tensor as keys and values of these shapes."""
    first, second = flat.split([key.numel(), value.numel()])
    return first.view(key.shape), second.view(value.shape)


def _pass_on(held: Tensor, group: ShardGroup, step: int, what: str) -> tuple[Pending | None, Tensor]:
    """Send what this rank holds to the next one, while it computes with it; the last step needs no more."""
    if step == group.size - 1:
        return None, held
    arriving = torch.empty_like(held)
    return group.rotate(held, arriving, what), arriving
