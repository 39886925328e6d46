"""Models that cannot work on slices, each for one reason, and models that say their loss in other ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from tests.parity.toy import gpt_class

GPT: Any = gpt_class()
SIZES: dict[str, Any] = {
    "vocabulary_size": 256, "num_blocks": 2, "width": 32, "num_heads": 4, "sequence_length": 32,
}  # fmt: skip


class WithoutPositions(GPT):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, labels)


class CountsItsOwnPositions(GPT):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, labels)


class ShiftsLabels(GPT):
    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids, None, position_ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class WithConvolution(GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.short = nn.Conv1d(32, 32, kernel_size=3, padding=1)


class LooksBack(GPT):
    """At the token before, which the first token of a slice does not have."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        return super().forward((input_ids + input_ids.roll(1, dims=1)) % 256, labels, position_ids)


class HandmadeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).chunk(3, dim=-1)
        return x + self.out((query @ key.transpose(-1, -2)).softmax(dim=-1) @ value)


class HandmadeAttention(GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks = nn.ModuleList(HandmadeBlock() for _ in range(2))


class MaskingBlock(HandmadeBlock):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.into(x).chunk(3, dim=-1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        query, key, value = (part.repeat(1, 2, 1, 1) for part in (query, key, value))
        return x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=seen)[:, 0])


class MakesItsMask(GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks = nn.ModuleList(MaskingBlock() for _ in range(2))


class OneHead(HandmadeBlock):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.into(x).chunk(3, dim=-1))
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])


class HidesItsHeads(GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks = nn.ModuleList(OneHead() for _ in range(2))


class ReturnsLogits(GPT):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, None, position_ids)


class ReturnsSum(GPT):
    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> engine.LossSum:
        logits = super().forward(input_ids, None, position_ids)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return engine.LossSum(total, (labels != -100).sum())


class NotesRandomNumbers(GPT):
    drawn: float = 0.0

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if self.training:
            self.drawn = float(torch.rand(()))
        return super().forward(input_ids, labels, position_ids)


def build(kind: type[nn.Module], **changes: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(**{**SIZES, **changes})
