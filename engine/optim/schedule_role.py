"""The Schedule role: the engine steps the scheduler, once per applied step, and nobody else does."""

from __future__ import annotations

from typing import Any

from engine.contracts import EngineError


class EngineSchedule:
    """Around any object with ``step()``. Raises EngineError in `step` for one that has moved since the last one."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.accept()

    def accept(self) -> None:
        """Take the scheduler as it stands now (a checkpoint was loaded into it)."""
        self._position = getattr(self.scheduler, "last_epoch", None)

    def step(self, tokens_seen: int) -> None:
        position = getattr(self.scheduler, "last_epoch", None)
        if position != self._position:
            raise EngineError(
                f"the learning-rate scheduler was stepped outside the engine (it stands at {position}, not at "
                f"{self._position}): engine.step() does that, remove scheduler.step() from the loop"
            )
        see = getattr(self.scheduler, "see_tokens", None)
        if callable(see):
            see(tokens_seen)
        self.scheduler.step()
        self.accept()
