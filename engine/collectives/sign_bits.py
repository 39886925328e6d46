"""Signs as bits, 8 to a byte: bit k of byte j is the sign of element 8 j + k, 1 for values >= 0.

A sign is one bit, so there is no zero: sgn(0) = +1. On the CPU numpy packs and torch's row lookup unpacks; these won of
the ways that `tests/bench/packing.py` compares. Other devices use torch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from engine.torch_compat import foreach_mul_

BLOCK = 1 << 22
"""Elements packed at once on the CPU; bounds the temporary, a byte an element."""

CACHED_BLOCK = 1 << 16
"""Elements whose temporaries stay in a core's cache."""

_GATHER = 0x0102040810204080
"""Multiplied with eight bytes of 0 or 1, it brings them together in the highest byte, the first byte lowest."""


def pack(values: Tensor, out: Tensor) -> None:
    """Signs of ``values`` (fp32, a multiple of 8 elements, contiguous) into ``out`` (uint8, one eighth as many)."""
    as_integers = values.view(torch.int32)  # a negative float is a negative integer
    if values.device.type == "cpu":
        source, target = as_integers.numpy(), out.numpy()
        for start in range(0, values.numel(), BLOCK):
            bits = numpy.packbits(source[start : start + BLOCK] >= 0, bitorder="little")
            target[start // 8 : start // 8 + bits.size] = bits
        return
    eight = (as_integers >= 0).view(torch.int64)
    out.copy_(eight.mul(_GATHER).bitwise_right_shift_(56))


def unpack(bits: Tensor, out: Tensor, scale: Tensor | None = None) -> None:
    """+``scale`` or -``scale`` (0-dim fp32; 1 if absent) into ``out`` (fp32, eight elements per byte of ``bits``)."""
    table = _signs_of_bytes(bits.device)
    torch.index_select(table if scale is None else table * scale, 0, bits.int(), out=out.view(-1, 8))


def subtract_signs(values: Tensor, scale: Tensor) -> None:
    """values -= scale * sgn(values). ``scale``: 0-dim, not negative. The signs are `pack`'s."""
    step = CACHED_BLOCK if values.device.type == "cpu" else max(values.numel(), 1)
    for start in range(0, values.numel(), step):
        block = values[start : start + step]
        block.sub_(torch.copysign(scale, block))


def multiply_segments(segments: Sequence[Tensor], scales: Tensor) -> None:
    """Each segment, in place, times its own entry of ``scales``; no wait for the device."""
    foreach_mul_(list(segments), list(scales.unbind()))


@functools.cache
def _signs_of_bytes(device: torch.device) -> Tensor:
    """The eight signs of every byte, (256, 8)."""
    bytes_, positions = torch.arange(256, device=device).unsqueeze(1), torch.arange(8, device=device)
    return torch.where((bytes_ >> positions) & 1 == 1, 1.0, -1.0)
