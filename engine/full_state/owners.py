"""Which engine a parameter belongs to, and by what name: what interfaces that take parameter objects need."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor

if TYPE_CHECKING:
    from engine.full_state.local import LocalState

engines: WeakSet[LocalState] = WeakSet()


def locate(parameter: Tensor) -> tuple[LocalState, str] | None:
    """The engine that holds ``parameter`` and its name there; None for a stranger.

    Objects from before `initialize` are known as well, and at stage 3 those that forward has gathered.
    """
    for owner in list(engines):
        info = owner.parameter_registry.info(parameter)  # type: ignore[arg-type]
        if info is not None:
            return owner, info.name
        for name, held in owner.module.named_parameters():
            if held is parameter:
                return owner, owner.parameter_registry.aliases.get(name, name)
    return None
