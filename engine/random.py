"""Counter-based random streams.

All that must agree between ranks (sample order, gates, kept tokens) comes from here: a stream is named by the seed
and by what it is for, so that its numbers depend neither on the rank, nor on the number of ranks, nor on how many
numbers other streams have drawn, and a resumed run needs no saved generator state.
"""

from __future__ import annotations

import hashlib
import json

import torch


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
