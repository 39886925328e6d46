"""Rules for `sequence_parallel_size` (Ulysses) and `parallel.context_parallel` (ring attention). Torch-free."""

from __future__ import annotations

import math


def length_unit(cp: int, sp: int) -> int:
    """What the length of a sequence must be a multiple of. Over cp > 1 each rank holds two chunks of equal length."""
    return cp * math.lcm(2, sp) if cp > 1 else sp
