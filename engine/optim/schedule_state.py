"""Any scheduler as a part of the run that survives a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.contracts import EngineError, OnLayoutChange, SavedLayout
from engine.optim.json_state import decode, encode


class ScheduleState:
    """Makes a scheduler a Stateful: one of ours, torch's, or any object with ``state_dict`` and ``load_state_dict``.

    The learning rates and momenta of the optimizer's groups are kept beside the scheduler's own state: torch's
    schedulers compute the next value from them. An object without a state has an empty one.
    """

    name = "lr_scheduler"
    on_layout_change: OnLayoutChange = "reshard"

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state(self) -> dict[str, Any]:
        read = getattr(self.scheduler, "state_dict", None)
        scheduled = [
            {key: group[key] for key in ("lr", "momentum", "betas") if key in group}
            for group in groups_of(self.scheduler)
        ]
        return {
            "type": type(self.scheduler).__name__,
            "scheduler": encode(read() if callable(read) else {}, "lr_scheduler"),
            "groups": encode(scheduled, "lr_scheduler.groups"),
        }

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None:
        """Raises EngineError when the saved state is another scheduler's, or of other parameter groups."""
        current = type(self.scheduler).__name__
        if state["type"] not in (None, current):  # an imported checkpoint may not say
            raise EngineError(
                f"The checkpoint holds the state of a {state['type']} learning-rate scheduler, but this run uses "
                f"{current}; use the same one, or load with load_lr_scheduler_states=False to start {current} anew."
            )
        # The groups first: a schedule in closed form overrules them with the current config's values.
        saved_groups = decode(state["groups"])
        groups = groups_of(self.scheduler)
        if len(saved_groups) != len(groups):
            raise EngineError(
                f"The checkpoint's {current} schedules {len(saved_groups)} parameter groups, but the optimizer has "
                f"{len(groups)}; group the parameters as before, or load with load_lr_scheduler_states=False."
            )
        for group, saved in zip(groups, saved_groups, strict=True):
            restore_group(group, saved)
        write = getattr(self.scheduler, "load_state_dict", None)
        if callable(write):
            write(decode(state["scheduler"]))


def groups_of(scheduler: Any) -> list[dict[str, Any]]:
    """The parameter groups that a scheduler writes into; none for an object that does not show its optimizer."""
    return list(getattr(getattr(scheduler, "optimizer", None), "param_groups", []))


def restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor):
            # A tensor learning rate is shared with a captured graph or a compiled step: it is filled, never replaced.
            group[key].fill_(float(value))
        else:
            group[key] = value
