"""A dataset that draws random numbers. Apart from the tests, so that a loader's worker imports torch alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

NUM_SAMPLES = 220


class Augmented(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.linspace(-1, 1, 8) * (index + 1) / NUM_SAMPLES
        return {"x": x + 0.1 * torch.randn(8), "y": x.flip(0)[:4], "ids": torch.tensor(index)}
