"""Counter-based random streams.

All that must agree between ranks (sample order, gates, kept tokens) comes from here: a stream is named by the seed
and by what it is for, so that its numbers depend neither on the rank, nor on the number of ranks, nor on how many
numbers other streams have drawn, and a resumed run needs no saved generator state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor


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


def kept_positions(seeds: Sequence[int], num_tokens: int, num_kept: int, device: torch.device) -> Tensor:
    """For each seed ``num_kept`` of the positions 0 to ``num_tokens`` - 1, every subset equally likely.

    int64 (len(seeds), num_kept) on ``device``, ascending. The numbers come from integer arithmetic alone, so they are
    the same on every device: position i of a stream gets SplitMix64's i-th number (Steele, Lea & Flood, OOPSLA 2014),
    and the smallest are kept.
    """
    bits = max(1, (num_tokens - 1).bit_length())
    positions = torch.arange(num_tokens, device=device)
    numbers = torch.tensor(list(seeds), device=device).unsqueeze(1) + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    numbers = (numbers ^ _shift_right(numbers, 30)) * _signed(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ _shift_right(numbers, 27)) * _signed(0x94D049BB133111EB)
    numbers = numbers ^ _shift_right(numbers, 31)
    # The position itself in the low bits: no ties, whose order would be the device's own.
    keys = ((numbers & (2**63 - 1)) >> bits << bits) | positions
    kept = keys.topk(num_kept, dim=1, largest=False, sorted=False).values & ((1 << bits) - 1)
    return kept.sort(dim=1).values


def _signed(number: int) -> int:
    """The int64 with these 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _shift_right(numbers: Tensor, places: int) -> Tensor:
    """Of unsigned numbers, which int64 stands in for."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)
