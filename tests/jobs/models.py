"""The example's model with planted faults, and one that waits in a chosen step until the test has done something."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_spec = importlib.util.spec_from_file_location(
    "example_model", Path(__file__).resolve().parents[2] / "examples" / "gpt_text" / "model.py"
)
assert _spec is not None
assert _spec.loader is not None
_example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_example)


class GPT(_example.GPT):  # type: ignore[misc, name-defined]
    """`fault`: what happens in the training forward number `at_forward` of rank `on_rank` (None: of every rank).

    "nan": the loss is NaN. "raise": a ValueError. "wait": every rank leaves a file `waitingRANK` in the folder `place`
    and goes on when `go` is there.
    """

    def __init__(
        self, fault: str = "", at_forward: int = 1, on_rank: int | None = None, place: str = "", **sizes: Any
    ) -> None:
        super().__init__(**sizes)
        self.fault, self.at_forward, self.on_rank, self.place = fault, at_forward, on_rank, Path(place)
        self.num_forwards = 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        loss = super().forward(input_ids, labels)
        rank = int(os.environ.get("RANK", "0"))
        if not self.training:
            return loss
        self.num_forwards += 1
        if self.num_forwards != self.at_forward or self.on_rank not in (None, rank):
            return loss
        if self.fault == "raise":
            raise ValueError("a planted fault")
        if self.fault == "wait":
            (self.place / f"waiting{rank}").write_text(str(os.getpid()))
            while not (self.place / "go").exists():
                time.sleep(0.01)
        return loss * torch.nan if self.fault == "nan" else loss
