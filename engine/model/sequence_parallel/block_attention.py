"""Attention of some queries to some keys, with what is needed to join the blocks of a softmax: their log-sum-exp.

The formulas are FlashAttention's (arXiv 2205.14135, 2307.08691). Without a mask on the CPU, torch's own kernel computes
them; otherwise, a tile of query rows at a time, matrix products in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from engine.torch_compat import flash_attention_cpu, flash_attention_cpu_backward

Mask = Tensor | Literal["causal"] | None
"""Which keys a query sees: bool (True: sees) or added to the scores, broadcast to (B, heads, queries, keys); the lower
triangle; or all."""

TILE_SCORES = 1 << 24
"""Scores (fp32) that are held at once where no kernel of torch's does it: 64 MiB."""


def block_forward(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """``query`` (B, heads, Q, D), ``key`` and ``value`` (B, heads, K, D) -> the output (B, heads, Q, D) and the
    log-sum-exp of the scores (B, heads, Q), both fp32. A query that sees nothing has output 0 and -inf."""
    if _has_kernel(query, value, mask):
        output, log_sum = flash_attention_cpu(query, key, value, mask == "causal", scale)
        return output.float(), log_sum.float()
    outputs, log_sums = [], []
    for rows, allowed in _tiles(query, key, mask):
        scores = _scores(query[:, :, rows], key, allowed, scale)
        log_sum = scores.logsumexp(dim=-1)
        weights = (scores - _finite(log_sum).unsqueeze(-1)).exp()
        outputs.append(weights @ value.float())
        log_sums.append(log_sum)
    return torch.cat(outputs, dim=2), torch.cat(log_sums, dim=2)


def block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    mask: Mask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What this block of keys adds to the gradients of query, key and value, fp32.

    ``output`` and ``log_sum`` are those of the whole softmax, over all blocks; ``gradient`` is of ``output``.
    """
    if _has_kernel(query, value, mask):
        found = flash_attention_cpu_backward(
            gradient.to(query.dtype), query, key, value, output.to(query.dtype), log_sum, mask == "causal", scale
        )
        return found[0].float(), found[1].float(), found[2].float()
    wide_key, wide_value = key.float(), value.float()
    to_query = []
    to_key, to_value = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
    for rows, allowed in _tiles(query, key, mask):
        part, own_gradient = query[:, :, rows], gradient[:, :, rows].float()
        scores = _scores(part, key, allowed, scale)
        weights = (scores - _finite(log_sum[:, :, rows]).unsqueeze(-1)).exp()
        to_value += weights.transpose(-1, -2) @ own_gradient
        delta = (own_gradient * output[:, :, rows].float()).sum(dim=-1, keepdim=True)
        to_scores = weights * (own_gradient @ wide_value.transpose(-1, -2) - delta) * scale
        to_query.append(to_scores @ wide_key)
        to_key += to_scores.transpose(-1, -2) @ part.float()
    return torch.cat(to_query, dim=2), to_key, to_value


def join(output: Tensor, log_sum: Tensor, further: Tensor, further_log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks of one softmax as one: outputs (.., Q, D), log-sum-exps (.., Q)."""
    joined = torch.logaddexp(log_sum, further_log_sum)
    ours = (log_sum - _finite(joined)).exp().unsqueeze(-1)
    theirs = (further_log_sum - _finite(joined)).exp().unsqueeze(-1)
    return output * ours + further * theirs, joined


def _has_kernel(query: Tensor, value: Tensor, mask: Mask) -> bool:
    is_plain = mask is None or isinstance(mask, str)
    return is_plain and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()


def _finite(log_sum: Tensor) -> Tensor:
    """-inf, of a query that sees nothing, as 0: exp(-inf - 0) is the 0 that its weights are."""
    return log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def _tiles(query: Tensor, key: Tensor, mask: Mask) -> Iterator[tuple[slice, Tensor | None]]:
    """Query rows, and what they see, in tiles of about `TILE_SCORES` scores."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if isinstance(mask, str):
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
    num_rows = max(1, TILE_SCORES // (query.shape[0] * query.shape[1] * num_keys))
    for start in range(0, num_queries, num_rows):
        rows = slice(start, min(start + num_rows, num_queries))
        if mask is None or mask.shape[-2] == 1:
            yield rows, mask
        else:
            yield rows, mask[..., rows, :]
