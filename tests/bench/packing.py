"""Ways to pack fp32 signs into bits and back, on one core: `python -m tests.bench.packing [MILLIONS]`.

Speeds are GB/s of the fp32 side per second of processor time, so that other processes do not count. The package's ways
write into buffers that are kept, as the collective does. The bar for `engine.collectives.sign_bits` is 1 GB/s.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import sys
import time
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from engine.collectives import sign_bits

ROUNDS = 3
CACHED = 1 << 16


def numpy_packbits(values: Tensor) -> Tensor:
    return torch.from_numpy(numpy.packbits(values.view(torch.int32).numpy() >= 0, bitorder="little"))


def torch_multiply(values: Tensor) -> Tensor:
    eight = (values.view(torch.int32) >= 0).view(torch.int64)
    return eight.mul(0x0102040810204080).bitwise_right_shift_(56).to(torch.uint8)


def torch_multiply_in_blocks(values: Tensor) -> Tensor:
    out = torch.empty(values.numel() // 8, dtype=torch.uint8)
    for start in range(0, values.numel(), CACHED):
        out[start // 8 : (start + CACHED) // 8] = torch_multiply(values[start : start + CACHED])
    return out


def torch_weighted_sum(values: Tensor) -> Tensor:
    weights = (2 ** torch.arange(8)).to(torch.uint8)
    return ((values >= 0).view(-1, 8) * weights).sum(1, dtype=torch.uint8)


@functools.cache
def kept(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def package_pack(values: Tensor) -> Tensor:
    out = kept(values.numel() // 8, torch.uint8)
    sign_bits.pack(values, out)
    return out


def numpy_unpackbits(bits: Tensor) -> Tensor:
    return torch.from_numpy(numpy.unpackbits(bits.numpy(), bitorder="little")).float().mul_(2.0).sub_(1.0)


def numpy_lookup(bits: Tensor) -> Tensor:
    return torch.from_numpy(_table().numpy()[bits.numpy()]).view(-1)


def torch_lookup(bits: Tensor) -> Tensor:
    return torch.index_select(_table(), 0, bits.int()).view(-1)


def torch_shifts(bits: Tensor) -> Tensor:
    return ((bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).float().mul_(2.0).sub_(1.0).view(-1)


def _table() -> Tensor:
    bytes_, positions = torch.arange(256).unsqueeze(1), torch.arange(8)
    return torch.where((bytes_ >> positions) & 1 == 1, 1.0, -1.0)


def package_unpack(bits: Tensor) -> Tensor:
    out = kept(bits.numel() * 8, torch.float32)
    sign_bits.unpack(bits, out)
    return out


PACK = (package_pack, numpy_packbits, torch_multiply, torch_multiply_in_blocks, torch_weighted_sum)
UNPACK = (package_unpack, numpy_unpackbits, numpy_lookup, torch_lookup, torch_shifts)


def seconds(function: Callable[[Tensor], Tensor], argument: Tensor) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        function(argument)
        best = min(best, time.process_time() - started)
    return best


def measure(numel: int) -> dict[str, float]:
    """GB/s of every way; each must give what the package gives."""
    values = torch.randn(numel)
    bits = package_pack(values).clone()
    speeds = {}
    for ways, argument, expected in ((PACK, values, bits), (UNPACK, bits, package_unpack(bits))):
        for way in ways:
            assert torch.equal(way(argument), expected), way.__name__
            speeds[way.__name__] = numel * 4 / 1e9 / seconds(way, argument)
    return speeds


def main() -> None:
    torch.set_num_threads(1)
    numel = 10**6 * int(sys.argv[1] if len(sys.argv) > 1 else 100) // CACHED * CACHED
    speeds = measure(numel)
    print(f"{numel / 1e6:.0f} M signs, one core, GB/s of fp32")
    for name, speed in speeds.items():
        print(f"  {name:<26}{speed:6.2f}")
    for names in (PACK, UNPACK):
        print("fastest:", max((way.__name__ for way in names), key=lambda name: speeds[name]))


if __name__ == "__main__":
    main()
