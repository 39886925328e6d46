"""The Schedule role: the engine steps the scheduler, once per applied step, and nobody else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.contracts import EngineError
from engine.optim.schedule_state import groups_of, restore_group


class EngineSchedule:
    """Around any object with ``step()``. Raises EngineError in `step` for one that has moved since the last one."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.accept()

    def written(self) -> list[dict[str, Any]]:
        """By group, the learning rate that the schedule has given it, and the momentum where it moves that too."""
        keys = (
            "lr",
            "initial_lr",
            *(("momentum", "betas") if getattr(self.scheduler, "cycle_momentum", False) else ()),
        )
        return [
            {key: float(group[key]) if isinstance(group[key], Tensor) else group[key] for key in keys if key in group}
            for group in groups_of(self.scheduler)
        ]

    def accept(self, written: Sequence[Mapping[str, Any]] = ()) -> None:
        """Take the scheduler as it stands now (a checkpoint was loaded into it).

        ``written``: of a schedule that was not loaded, what it had given the groups, which the optimizer's state has
        overwritten.
        """
        for group, values in zip(groups_of(self.scheduler), written, strict=False):
            restore_group(group, values)
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
