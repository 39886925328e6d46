"""What every engine trains: one GPT, one stream of tokens, one optimizer. Knows of no engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Workload:
    """``micro_batch_size`` is per rank; the first ``num_warmup`` of the ``num_steps`` optimizer steps are not timed."""

    size: str
    vocabulary: int
    num_layers: int
    num_heads: int
    width: int
    micro_batch_size: int
    num_steps: int
    num_warmup: int
    accumulation_steps: int = 1
    sequence_length: int = 128
    max_sequence_length: int = 256
    seed: int = 1234
    clip: float = 1.0
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    @property
    def adamw_arguments(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        fields = json.loads(text)
        return cls(**{**fields, "betas": tuple(fields["betas"])})

    def override(self, **values: int | None) -> Workload:
        """A copy with the values that are not None."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]


WORKLOADS = {
    workload.size: workload
    for workload in (
        Workload("tiny", 512, num_layers=4, num_heads=4, width=128, micro_batch_size=4, num_steps=25, num_warmup=5),
        Workload("small", 1024, num_layers=12, num_heads=4, width=256, micro_batch_size=4, num_steps=12, num_warmup=2),
        Workload("medium", 4096, num_layers=10, num_heads=10, width=640, micro_batch_size=2, num_steps=8, num_warmup=2),
    )
}
"""0.9 M parameters, where a step is mostly overhead; 10 M, for slow networks; and 52 M, where a step is mostly
arithmetic and communication."""

SKEW = 4
"""The exponent that crowds uniform numbers towards the first tokens."""


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normalised stream and added to it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        projected = self.query_key_value(self.attention_norm(stream))
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_output(attended.transpose(1, 2).flatten(-2))
        return stream + self.down(functional.gelu(self.up(self.feedforward_norm(stream))))


class GPT(nn.Module):
    """``forward(tokens, targets)``, both of shape (batch, sequence), is the mean cross-entropy. The head is tied."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(workload.vocabulary, workload.width)
        self.positions = nn.Embedding(workload.max_sequence_length, workload.width)
        self.blocks = nn.ModuleList(Block(workload.width, workload.num_heads) for _ in range(workload.num_layers))
        self.norm = nn.LayerNorm(workload.width)
        self.head = nn.Linear(workload.width, workload.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            stream = block(stream)
        return functional.cross_entropy(self.head(self.norm(stream)).flatten(0, 1), targets.flatten())


def build_model(workload: Workload) -> GPT:
    """The same weights on every rank, for every engine."""
    torch.manual_seed(workload.seed)
    return GPT(workload)


def batches(workload: Workload, rank: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Every rank's own ``(tokens, targets)`` for each micro-step of each step, made before anything is timed.

    Few tokens are frequent and most are rare, as in text. With evenly spread tokens gradients would nearly cancel and
    clipping, which is part of what is measured and compared, would hardly ever act.
    """
    generator = torch.Generator().manual_seed(workload.seed + 7919 * rank)
    shape = (workload.micro_batch_size, workload.sequence_length + 1)

    def draw() -> tuple[Tensor, Tensor]:
        tokens = (torch.rand(shape, generator=generator) ** SKEW * workload.vocabulary).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return [[draw() for _ in range(workload.accumulation_steps)] for _ in range(workload.num_steps)]
