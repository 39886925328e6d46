"""What an engine keeps between its boundaries: the accumulation window, and the counters of the run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.contracts import OnLayoutChange, SavedLayout


@dataclass
class Window:
    """What has come together since the last boundary.

    ``loss``: the sum of this rank's losses (or of its `LossSum` totals, then ``count`` of their counts), and
    ``divided_loss`` of those that the user had divided by the accumulation steps. ``num_forwards``: training forwards.
    ``share``: the part of a full window that this one is taken for, below 1 where `flush` closed it early.
    ``seconds`` by phase, since ``started``.
    """

    loss: Tensor | float = 0.0
    divided_loss: Tensor | float = 0.0
    num_losses: int = 0
    count: Tensor | float = 0.0
    num_counted: int = 0
    num_micro_steps: int = 0
    num_forwards: int = 0
    num_tokens: int = 0
    share: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def add_loss(self, loss: Tensor, is_divided: bool) -> None:
        self.num_losses += 1
        if is_divided:
            self.divided_loss = self.divided_loss + loss
        else:
            self.loss = self.loss + loss

    def mean_loss(self, managed: bool) -> Tensor | float:
        """This rank's mean over the micro-batches that came (for `LossSum`, the sum)."""
        if self.num_counted:
            return self.loss
        return self.loss / max(self.num_micro_steps if managed else self.num_losses, 1) + self.divided_loss

    def spend(self, phase: str, started: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def leave_out(self, started: float) -> None:
        """What has happened since ``started`` (an evaluation, a save) is not part of a step's time."""
        self.started += time.perf_counter() - started


class Counters:
    """The engine's counters as a part of its state."""

    name = "run"
    on_layout_change: OnLayoutChange = "reshard"
    NAMES = ("global_steps", "global_samples", "global_tokens", "micro_steps", "skipped_steps")
    LATER_NAMES = ("layers_skipped", "saved_layer_tokens")
    """Absent from checkpoints of versions that had no layer or token dropping."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state(self) -> dict[str, Any]:
        return {name: getattr(self._engine, name) for name in (*self.NAMES, *self.LATER_NAMES)}

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None:
        for name in self.NAMES:
            setattr(self._engine, name, state[name])
        for name in self.LATER_NAMES:
            setattr(self._engine, name, state.get(name, 0))
        if self._engine.plan.batch.managed:
            # a save inside a window has nothing of it, and another layout may have other windows
            self._engine.micro_steps = self._engine.global_steps * self._engine.gradient_accumulation_steps()
