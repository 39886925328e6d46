"""What every ZeRO stage hands to the optimizer and to checkpoints: local pieces of parameters, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checkpoint.boxes import flat_range_boxes
from engine.contracts import Chunk
from engine.parameters import ParameterInfo
from engine.plan.cuts import assign_owners


@dataclass(frozen=True)
class ParameterShard:
    """This rank's part of one parameter, as the optimizer sees it.

    ``parameter`` is the master (fp32 where the model is 16-bit), local; it holds the elements ``[start, stop)`` of
    the row-major flattened parameter as ``info.shape`` has it (of this tp rank's part, where layers are split), shaped
    like it where it is all of it.
    """

    info: ParameterInfo
    parameter: nn.Parameter
    start: int
    stop: int
    on_every_rank: bool = False
    """Whether all data-parallel ranks hold the same, so that the first saves it. Else the stage says which save."""

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.info.numel

    def part_of(self, whole: Tensor) -> Tensor:
        """What this shard holds of ``whole``, a tensor like the user's whole parameter."""
        return self.info.part(whole.detach()).reshape(-1)[self.start : self.stop].view(self.parameter.shape)

    def chunks(self, name: str, tensor: Tensor) -> Iterator[Chunk]:
        """``tensor`` (one value per element of this shard) as boxes of the global tensor ``name``."""
        flat = tensor.view(-1)
        position = 0
        for offsets, sizes in flat_range_boxes(self.info.shape, self.start, self.stop):
            numel = torch.Size(sizes).numel()
            values = flat[position : position + numel].view(sizes)
            position += numel
            cut = self.info.cut
            if cut is None:
                yield Chunk(name, self.info.shape, offsets, sizes, values)
                continue
            at = cut.dimension
            for first, start, length in cut.boxes(offsets[at], sizes[at]):
                place = (*offsets[:at], start, *offsets[at + 1 :])
                extents = (*sizes[:at], length, *sizes[at + 1 :])
                yield Chunk(name, cut.global_shape, place, extents, values.narrow(at, first, length))


def owners_of(infos: Sequence[ParameterInfo], shared: Mapping[int, tuple[int, ...]], num_ranks: int) -> dict[int, int]:
    """Registry index -> owner, as `assign_owners`; what other pipeline ranks hold too (``shared``: which ranks) is
    dealt out apart, so that its owners have the same place on each of them."""
    owners: dict[int, int] = {}
    for ranks in sorted({shared.get(info.index, ()) for info in infos}):
        together = [info for info in infos if shared.get(info.index, ()) == ranks]
        dealt = assign_owners([info.numel for info in together], num_ranks)
        owners |= {info.index: owner for info, owner in zip(together, dealt, strict=True)}
    return owners


ROW = 1 << 10
MAX_NUMEL_OF_ONE_SUM = 4 * ROW
"""Up to here one fp32 sum is exact enough for a norm."""


def sum_of_squares(flat: Tensor, exact: bool = False) -> Tensor:
    """The squared L2 norm of a flat tensor, 0-dim float64.

    Summed over rows of 1024 elements in the tensor's own precision (fp32 at least), then in float64. One fp32 sum over
    8 million elements, as `torch.linalg.vector_norm` takes it on the CPU, is off by 1e-3; this by 4e-8, at the same
    speed. ``exact`` squares in
    float64, where a large but finite gradient does not overflow.
    """
    if exact:
        return flat.double().square().sum()
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    body = flat.numel() // ROW * ROW
    total = torch.linalg.vector_norm(flat[:body].view(-1, ROW), dim=1).double().square().sum()
    if body < flat.numel():
        total += torch.linalg.vector_norm(flat[body:]).double().square()
    return total


def first_nonfinite(shards: Sequence[ParameterShard]) -> int | None:
    """The lowest registry index whose gradient here holds an inf or a NaN."""
    indices = (s.info.index for s in shards if s.parameter.grad is not None and not s.parameter.grad.isfinite().all())
    return min(indices, default=None)
