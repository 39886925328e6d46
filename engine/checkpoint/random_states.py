"""The global random generators, as a part of the run's state."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch

from engine.contracts import OnLayoutChange, SavedLayout


class RandomStates:
    """The global generators of Python, numpy and torch, which are the user's own: each rank's come back to it.

    The engine's own draws do not depend on them. Under another layout they are dropped: they belonged to ranks.
    """

    name = "random_states"
    on_layout_change: OnLayoutChange = "drop"

    def state(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, list(numbers), gauss],
            "torch": _to_text(torch.get_rng_state()),
        }
        if torch.accelerator.is_available():
            module = torch.get_device_module(torch.accelerator.current_accelerator())
            state["accelerator"] = _to_text(module.get_rng_state())
        if "numpy" in sys.modules:
            kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
            state["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
        return state

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(_from_text(state["torch"]))
        if "accelerator" in state and torch.accelerator.is_available():
            torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(
                _from_text(state["accelerator"])
            )
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
