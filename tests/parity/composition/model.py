"""The toy model of the composition matrix, its data, and what its rows are worth to a sampler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from tests.parity.composition.features import (
    FROZEN,
    GLOBAL_BATCH,
    NUM_BLOCKS,
    NUM_HEADS,
    SEQUENCE_LENGTH,
    VOCABULARY_SIZE,
    WIDTH,
    Cell,
)
from tests.parity.test_precision import Poisoned
from tests.parity.toy import gpt_class, toy_batch

GPT: Any = gpt_class()


class Toy(GPT):
    """``poison``: the loss's gradient is infinite."""

    poison = False

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        loss = super().forward(input_ids, labels, position_ids)
        return Poisoned.apply(loss) if self.poison else loss


class Recomputing(Toy):
    """Blocks keep their inputs alone, and run again in the backward."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        kind = type(self.blocks[0])

        class Recomputed(kind):  # type: ignore[misc, valid-type]
            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(super().forward, x, use_reentrant=False)

        for block in self.blocks:
            block.__class__ = Recomputed


def model_of(cell: Cell, seed: int = 0) -> nn.Module:
    """Weights so large that attention looks at some tokens more than at others."""
    kind = Recomputing if cell.has("recomputes") else Toy
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = kind(
            vocabulary_size=VOCABULARY_SIZE,
            num_blocks=NUM_BLOCKS,
            width=WIDTH,
            num_heads=NUM_HEADS,
            sequence_length=SEQUENCE_LENGTH,
            tie_embeddings=cell.has("ties"),
        )
        for name, p in model.named_parameters():
            if "norm.weight" not in name:
                nn.init.normal_(p, std=0.2)
    for name, p in model.named_parameters():
        if cell.has("freezes") and name.startswith(FROZEN):
            p.requires_grad_(False)
    return model


def batch_of(step: int) -> dict[str, Tensor]:
    """The samples of a step, (GLOBAL_BATCH, SEQUENCE_LENGTH)."""
    return {
        name: rows[:, :SEQUENCE_LENGTH].contiguous()
        for name, rows in toy_batch(step, GLOBAL_BATCH, VOCABULARY_SIZE).items()
    }


class Samples(Dataset[dict[str, Tensor]]):
    """More than a run needs, and more than a hundred, for percentiles."""

    def __init__(self) -> None:
        batches = [batch_of(step) for step in range(16)]
        self.columns = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[index] for name, rows in self.columns.items()}
