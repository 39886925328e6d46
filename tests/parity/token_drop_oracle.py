"""Random-LTD computed the slow way: sample by sample, with positions and masks written out.

Nothing of engine/model is used. `GptOracle` runs the toy GPT's middle blocks on explicitly selected tokens;
`install` runs a Hugging Face model's middle blocks on all tokens, the dropped ones masked out of the keys, and takes
the kept rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.random import stream_seed

WORD = 2**64 - 1


def kept(seed: int, step: int, layer: int, sample: int, num_tokens: int, num_kept: int, piece: int = 0) -> list[int]:
    """The positions of one sample of the global batch, or of a piece of it, by SplitMix64 in Python's integers."""
    state, bits = stream_seed(seed, "kept_tokens", step, layer, sample, piece), max(1, (num_tokens - 1).bit_length())
    keys = []
    for position in range(num_tokens):
        z = (state + (position + 1) * 0x9E3779B97F4A7C15) & WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        z ^= z >> 31
        keys.append(((z & (2**63 - 1)) >> bits, position))
    return sorted(position for _, position in sorted(keys)[:num_kept])


@dataclass
class Now:
    """Where the oracle's run is. ``lengths``: kept tokens by step; ``first_sample`` of the micro-batch under way."""

    lengths: Sequence[int]
    seed: int = 0
    step: int = 0
    first_sample: int = 0
    padding: Tensor | None = None

    def kept(self, layer: int, sample: int, num_tokens: int) -> list[int]:
        num_kept = min(self.lengths[self.step], num_tokens)
        return kept(self.seed, self.step, layer, self.first_sample + sample, num_tokens, num_kept)


class GptOracle(nn.Module):
    """The toy GPT; its parameters have the names of the inner model's."""

    def __init__(self, inner: nn.Module, now: Now) -> None:
        super().__init__()
        self.inner, self.now = inner, now

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.named_parameters(*args, **kwargs)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        inner = self.inner
        x = inner.token_embedding(input_ids) + inner.position_embedding(torch.arange(input_ids.shape[1]))
        last = len(inner.blocks) - 1
        for layer, block in enumerate(inner.blocks):
            if layer in (0, last):
                x = block(x)
                continue
            x = self.on_tokens(block, x, layer)
        self.now.first_sample += len(input_ids)
        return F.cross_entropy(inner.head(inner.norm(x)).flatten(0, 1).float(), labels.flatten())

    def on_tokens(self, block: nn.Module, x: Tensor, layer: int) -> Tensor:
        """A block that drops tokens, sample by sample."""
        rows = []
        for sample in range(len(x)):
            positions = self.now.kept(layer, sample, x.shape[1])
            computed = dict(zip(positions, gpt_block(block, x[sample], positions), strict=True))
            rows.append(torch.stack([computed.get(at, x[sample, at]) for at in range(x.shape[1])]))
        return torch.stack(rows)

    def shown(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """For `reference_run`: notes the step."""
        if step != self.now.step:
            self.now.step, self.now.first_sample = step, 0
        return batch


def gpt_block(block: nn.Module, x: Tensor, positions: list[int]) -> Tensor:
    """(tokens, width) -> the rows of ``positions``, which see those of them that are not behind."""
    x = x[positions]
    position = torch.tensor(positions)
    query, key, value = block.attention_in(block.attention_norm(x)).chunk(3, dim=-1)
    allowed = position.unsqueeze(1) >= position.unsqueeze(0)
    mixed = []
    for q, k, v in zip(*(t.chunk(block.num_heads, dim=-1) for t in (query, key, value)), strict=True):
        scores = (q @ k.t()).float() / q.shape[-1] ** 0.5
        mixed.append(scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).to(v.dtype) @ v)
    x = x + block.attention_out(torch.cat(mixed, dim=-1))
    return x + block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(x))))


Call = Callable[[Callable[..., Any], Tensor, Tensor, tuple[Any, ...], dict[str, Any]], Tensor]
"""A block's forward, one sample (1, tokens, width), its additive mask (1, 1, tokens, tokens), the other arguments."""


def gpt2_call(forward: Callable[..., Any], x: Tensor, mask: Tensor, args: Any, kwargs: Any) -> Tensor:
    return forward(x, None, mask)


def bert_call(forward: Callable[..., Any], x: Tensor, mask: Tensor, args: Any, kwargs: Any) -> Tensor:
    return forward(x, mask)


def llama_call(forward: Callable[..., Any], x: Tensor, mask: Tensor, args: Any, kwargs: Any) -> Tensor:
    return forward(x, attention_mask=mask, position_embeddings=kwargs["position_embeddings"])


def install(blocks: Sequence[nn.Module], call: Call, is_causal: bool, now: Now) -> None:
    for layer, block in enumerate(blocks):
        if 0 < layer < len(blocks) - 1:
            block.forward = _masked(block.forward, layer, call, is_causal, now)


def _masked(forward: Callable[..., Any], layer: int, call: Call, is_causal: bool, now: Now) -> Callable[..., Any]:
    def on_all_tokens(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = []
        for sample in range(len(hidden)):
            length = hidden.shape[1]
            positions = now.kept(layer, sample, length)
            mask = torch.full((length, length), torch.finfo(hidden.dtype).min)
            for query in range(length):
                for key in positions:
                    real = now.padding is None or bool(now.padding[sample, key])
                    if real and (key <= query or not is_causal):
                        mask[query, key] = 0.0
            output = call(forward, hidden[sample : sample + 1], mask[None, None], args, kwargs)[0]
            rows.append(torch.stack([output[at] if at in positions else hidden[sample, at] for at in range(length)]))
        return torch.stack(rows)

    return on_all_tokens
