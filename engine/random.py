"""Counter-based random streams.

All that must agree between ranks (sample order, gates, kept tokens) comes from here: a stream is named by the seed
and by what it is for, so that its numbers depend neither on the rank, nor on the number of ranks, nor on how many
numbers other streams have drawn, and a resumed run needs no saved generator state.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from typing import Any

import torch

from engine.contracts import OnLayoutChange, SavedLayout


def stream_seed(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed for the stream ``(seed, *purpose)``: the same on every machine, process and Python version.

    ``stream_seed(1, 23)``, ``stream_seed(12, 3)`` and ``stream_seed(1, "23")`` differ: the arguments are hashed in an
    encoding that keeps their borders and types. Raises TypeError for anything but integers and strings.
    """
    for part in (seed, *purpose):
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a random stream is named by integers and strings, not by {part!r} ({type(part)})")
    encoded = json.dumps([seed, *purpose], separators=(",", ":")).encode("ascii")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big") >> 1


def generator(seed: int, *purpose: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator at the start of the stream ``(seed, *purpose)``.

    Generators of different device types draw different numbers from one seed: what ranks must agree on is drawn on
    the CPU.
    """
    return torch.Generator(device=device).manual_seed(stream_seed(seed, *purpose))


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
            torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(_from_text(state["accelerator"]))
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
