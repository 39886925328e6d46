"""The error-compensated 1-bit all-reduce of 1-bit Adam (Tang et al., arXiv 2102.02888, section 3 and figure 3).

Every rank i has a tensor x_i; all get nearly the mean of them, and what was rounded away comes back in the next call:

    worker i:          y = x_i + e_i;       q_i = s_i sgn(y), s_i = RMS(y);   e_i = y - q_i
    all-to-all:        chunk r of every q_i, as bits, and s_i to rank r
    server r:          z = mean_i(q_i) + E; Q_r = S_r sgn(z), S_r = RMS(z);   E = z - Q_r
    all-gather:        Q_r, as bits, and S_r to every rank; the result is (Q_0, ..., Q_{N-1})

so that mean(x) + mean(e) + E before the call equal the result + mean(e) + E after it. The result is made of the bytes
that travelled, and so is the same to the bit on every rank. Per call and rank D / 4 * (N - 1) / N bytes of signs are
sent and 8 (N - 1) of scales, against 8 D (N - 1) / N for an all-reduce in fp32.

`begin`, `serve` and `finish` are the three parts between which bytes travel: a caller with several tensors calls
`begin` for all of them, then `serve`, then `finish`, and packs one while another is on the wire.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.collectives.shards import Pending, ShardGroup
from engine.collectives.sign_bits import multiply_segments, pack, subtract_signs, unpack

Scale = Literal["rms", "l1"]
Range = tuple[int, int]


class _SignCompressor:
    """One side's error feedback: y (the error buffer, to which the caller added) becomes scales and sign bits, and the
    buffer keeps what they do not say. ``bounds``: where the segments with a scale each lie; beyond the last one are
    pads, which stay zero. ``mask``: 0 or 1 per element up to there; what it leaves out stays zero as well."""

    def __init__(self, numel: int, bounds: Sequence[int], device: torch.device, scale: Scale, mask: Tensor | None):
        self.error = torch.zeros(numel, dtype=torch.float32, device=device)
        self.num_scales = len(bounds) - 1
        self._bounds, self._scale_kind, self._mask = list(bounds), scale, mask
        self._segments = [self.error[a:b] for a, b in itertools.pairwise(bounds)]
        counts = torch.tensor([b - a for a, b in itertools.pairwise(bounds)], device=device)
        if mask is not None:
            counts = torch.stack([mask[a - bounds[0] : b - bounds[0]].sum() for a, b in itertools.pairwise(bounds)])
        self._counts = counts.to(torch.float32)
        self._held: list[tuple[Range, Tensor]] = []

    def hold(self, ranges: Sequence[Range]) -> None:
        """Leave these elements out of the next `compress`: their errors stay as they are now."""
        self._held = [((a, b), self.error[a:b].clone()) for a, b in ranges]

    def compress(self, bits: Tensor) -> Tensor:
        """Returns the scales (fp32, one per segment) and writes the signs into ``bits``."""
        y, counted = self.error, self.error[: self._bounds[-1]]
        for (a, b), _ in self._held:
            y[a:b].zero_()
        if self._mask is not None:
            counted.mul_(self._mask)
        y[self._bounds[-1] :].zero_()
        scales = self._scales()
        pack(y, bits)
        if self.num_scales == 1:
            subtract_signs(y, scales[0])
        else:
            said = torch.empty_like(y)
            unpack(bits, said)
            multiply_segments([said[a:b] for a, b in itertools.pairwise(self._bounds)], scales)
            y.sub_(said)
        if self._mask is not None:
            counted.mul_(self._mask)
        y[self._bounds[-1] :].zero_()
        for (a, b), error in self._held:
            y[a:b].copy_(error)
        self._held = []
        return scales

    def _scales(self) -> Tensor:
        counts = self._counts
        for (a, b), _ in self._held:
            overlaps = [max(0, min(b, d) - max(a, c)) for c, d in itertools.pairwise(self._bounds)]
            counts = counts - torch.tensor(overlaps, dtype=torch.float32, device=counts.device)
        counts = counts.clamp(min=1.0)
        if self._scale_kind == "l1":
            return torch.stack([part.abs().sum() for part in self._segments]) / counts
        norms = torch.stack([torch.linalg.vector_norm(part) for part in self._segments])
        return norms / counts.sqrt()


class CompressedAllReduce:
    """The collective for one flat fp32 tensor of ``numel`` elements over ``group``, with its two error buffers.

    ``segments``: lengths of consecutive parts that have a scale of their own (default: one for all).
    ``mask``: flat, 0 or 1 per element; what it leaves out is zero in the result and in the errors and is not counted in
    a scale. ``scale``: ``rms`` as in the paper, or ``l1`` (the mean absolute value), whose error is smaller than its
    input whatever the distribution. ``counts_padding``: as DeepSpeed does, let pads join the scales and errors.

    Memory: 4 D + 4 D / N bytes of errors, and the messages. With one rank nothing is compressed.
    """

    def __init__(
        self,
        numel: int,
        group: ShardGroup,
        device: torch.device,
        *,
        segments: Sequence[int] | None = None,
        mask: Tensor | None = None,
        scale: Scale = "rms",
        counts_padding: bool = False,
    ) -> None:
        self.numel, self._group = numel, group
        size = group.size
        quantum = size * math.lcm(size, 8) if counts_padding else 8 * size
        self.padded = -(-numel // quantum) * quantum
        self._chunk = self.padded // size
        if size == 1:
            self._workers = self._servers = None
            self.worker_error = self.server_error = torch.zeros(0, device=device)
            return
        bounds = [0, *itertools.accumulate(segments or (numel,))]
        if bounds[-1] != numel or 0 in (segments or ()):
            raise ValueError(f"segments of {bounds[-1]} elements, none empty, must make up the tensor's {numel}")
        if counts_padding:
            bounds[-1] = self.padded
        if mask is not None and counts_padding:
            mask = torch.cat([mask, mask.new_ones(self.padded - numel)])
        self._pieces = [_cut(bounds, self._chunk * r, self._chunk * (r + 1)) for r in range(size)]
        own, first = self._pieces[group.rank], self._chunk * group.rank
        counted = slice(first, first + own[-1])
        self._worker = _SignCompressor(self.padded, bounds, device, scale, mask)
        self._server = _SignCompressor(self._chunk, own, device, scale, None if mask is None else mask[counted])
        self.worker_error, self.server_error = self._worker.error, self._server.error
        self._mask = mask
        self._held: Sequence[Range] = ()
        self._pending: Pending | None = None
        num_bits, num_scales = self._chunk // 8, self._worker.num_scales
        # a message is the bits of a chunk and then scales; alignment of the scales is the reader's affair
        self._to_servers = torch.empty(size, num_bits + 4 * num_scales, dtype=torch.uint8, device=device)
        self._from_workers = torch.empty_like(self._to_servers)
        self._message_bounds = [0]
        for piece in self._pieces:
            self._message_bounds.append(self._message_bounds[-1] + num_bits + 4 * (len(piece) - 1))
        self._gathered = torch.empty(self._message_bounds[-1], dtype=torch.uint8, device=device)
        self._signs = torch.empty(self._chunk, dtype=torch.float32, device=device)
        self._own_parts = [self._signs[a:b] for a, b in itertools.pairwise(own)]
        first_segment = min(bisect.bisect_right(bounds, first), self._worker.num_scales) - 1
        self._own_segments = slice(first_segment, first_segment + len(self._own_parts))

    def __call__(self, x: Tensor, held: Sequence[Range] = ()) -> None:
        """The three parts in a row."""
        self.begin(x, held)
        self.serve()
        self.finish(x)

    def rescale_errors(self, factor: Tensor) -> None:
        """Multiply the errors by ``factor`` (flat, the same on all ranks): the unit of what is reduced has changed."""
        if self._group.size == 1:
            return
        self.worker_error[: self.numel].mul_(factor)
        own = factor[self._chunk * self._group.rank :][: self._chunk]
        self.server_error[: own.numel()].mul_(own)

    def begin(self, x: Tensor, held: Sequence[Range] = ()) -> None:
        """Compress this rank's ``x`` (flat fp32, local) and send it to the servers.

        ``held``: ranges, the same on all ranks, that this call leaves alone: in ``x`` and in the errors.
        """
        if self._group.size == 1:
            return
        self._held = held
        self._worker.hold(held)
        self.worker_error[: self.numel].add_(x)
        num_bits = self._chunk // 8
        bits = torch.empty(self.padded // 8, dtype=torch.uint8, device=x.device)
        scales = self._worker.compress(bits)
        self._to_servers[:, :num_bits].copy_(bits.view(self._group.size, num_bits))
        self._to_servers[:, num_bits:].copy_(scales.view(torch.uint8))
        self._pending = self._group.all_to_all(self._to_servers, self._from_workers)

    def serve(self) -> None:
        """Average this rank's chunk, compress it again and send it to all."""
        if self._group.size == 1:
            return
        assert self._pending is not None
        self._pending.wait()
        num_bits, rank, size = self._chunk // 8, self._group.rank, self._group.size
        first = rank * self._chunk
        self._server.hold(_within(self._held, first, first + self._chunk))
        for message in self._from_workers:
            scales = message[num_bits:].clone().view(torch.float32) / size
            if scales.numel() == 1:
                unpack(message[:num_bits], self._signs, scales[0])
            else:
                unpack(message[:num_bits], self._signs)
                multiply_segments(self._own_parts, scales[self._own_segments])
            self.server_error.add_(self._signs)
        own = self._gathered[self._message_bounds[rank] : self._message_bounds[rank + 1]]
        own[num_bits:].copy_(self._server.compress(own[:num_bits]).view(torch.uint8))
        self._pending = self._group.all_gather(self._gathered, self._message_bounds)

    def finish(self, x: Tensor) -> None:
        """Write the result into ``x``, the same on every rank."""
        if self._group.size == 1:
            return
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        num_bits = self._chunk // 8
        held = [((a, b), x[a:b].clone()) for a, b in self._held]
        for rank, piece in enumerate(self._pieces):
            message = self._gathered[self._message_bounds[rank] : self._message_bounds[rank + 1]]
            scales = message[num_bits:].clone().view(torch.float32)
            first = rank * self._chunk
            target = x[first : first + self._chunk]
            whole = target if target.numel() == self._chunk else self._signs
            if scales.numel() == 1:
                unpack(message[:num_bits], whole, scales[0])
            else:
                unpack(message[:num_bits], whole)
                multiply_segments([whole[a:b] for a, b in itertools.pairwise(piece)], scales)
            if whole is not target:
                target.copy_(whole[: target.numel()])
        if self._mask is not None:
            x.mul_(self._mask[: self.numel])
        for (a, b), values in held:
            x[a:b].copy_(values)
        self._held = ()


def _cut(bounds: Sequence[int], first: int, stop: int) -> list[int]:
    """The segments between ``bounds`` inside ``[first, stop)``, counted from ``first``; at least one, maybe empty."""
    inner = [bound - first for bound in bounds if first < bound < stop]
    last = max(0, min(bounds[-1], stop) - first)
    return [0, *(bound for bound in inner if bound < last), last]


def _within(ranges: Sequence[Range], first: int, stop: int) -> list[Range]:
    """The parts of ``ranges`` inside ``[first, stop)``, counted from ``first``."""
    return [(max(a, first) - first, min(b, stop) - first) for a, b in ranges if max(a, first) < min(b, stop)]
