"""The one small all-reduce of a step: norm, loss, counts and requests together, so that all ranks decide alike.

Every call says what it is for, and the numbers have one length, so ranks that came to different calls find out at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from engine.collectives.shards import ShardGroup
from engine.collectives.stall import watch
from engine.contracts import EngineError
from engine.plan.cuts import AGREEMENT_NUMBERS


class Agreement:
    """Sums named numbers over all ranks, in float64. The sums are the same bits on every rank."""

    def __init__(self, world: ShardGroup, device: torch.device) -> None:
        self._world = world
        self._device = device

    def sum(self, values: Mapping[str, Tensor | float], call: str) -> dict[str, float]:
        """One all-reduce, and the step's one wait for the device.

        ``call``: what this rank is in, "step()" say. Raises EngineError, alike on all ranks, where they are in
        different ones.
        """
        code = zlib.crc32(call.encode()) & 0xFFFFF  # 20 bits: the sum of squares is exact for any number of ranks
        numbers = [
            value.detach().to(self._device, torch.float64).reshape(())
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float64, device=self._device)
            for value in (code, code**2, *values.values(), *[0.0] * (AGREEMENT_NUMBERS - 2 - len(values)))
        ]
        packed = torch.stack(numbers)
        assert len(packed) == AGREEMENT_NUMBERS
        self._world.all_reduce(packed, f"the agreement of {call}").wait()
        codes, squares, *sums = packed.tolist()
        if codes != code * self._world.size or squares != code**2 * self._world.size:
            self._refuse(call)
        return dict(zip(values, sums, strict=False))

    def _refuse(self, call: str) -> None:
        calls: list[str] = [""] * self._world.size
        dist.all_gather_object(calls, f"{call} ({watch.place})", group=self._world.group)
        ranks_in: dict[str, list[str]] = {}
        for rank, their_call in enumerate(calls):
            ranks_in.setdefault(their_call, []).append(str(rank))
        found = "; ".join(f"rank {', '.join(ranks)} in {their_call}" for their_call, ranks in ranks_in.items())
        raise EngineError(
            f"the ranks are in different calls: {found}. Every rank must make the same calls of the engine"
        )

    def first_text(self, text: str | None) -> str:
        """The text of the lowest rank that has one; one of them has. All ranks call it."""
        texts: list[str | None] = [text]
        if self._world.size > 1:
            texts = [None] * self._world.size
            dist.all_gather_object(texts, text, group=self._world.group)
        return next(each for each in texts if each is not None)

    def common(self, indices: list[int], size: int) -> set[int]:
        """The indices below ``size`` that every rank gave."""
        flags = torch.zeros(size, dtype=torch.float64, device=self._device)
        flags[indices] = 1.0
        self._world.all_reduce(flags, "agreeing on unused parameters").wait()
        return set(torch.nonzero(flags == float(self._world.size)).flatten().tolist())

    def lowest(self, rank_and_index: tuple[int, int] | None) -> tuple[int, int] | None:
        """The lowest (rank, index) that any rank gave, each for itself."""
        flags = torch.zeros(self._world.size, dtype=torch.float64, device=self._device)
        if rank_and_index is not None:
            flags[rank_and_index[0]] = 1.0 + rank_and_index[1]
        self._world.all_reduce(flags, "agreeing on the first non-finite gradient").wait()
        given = torch.nonzero(flags).flatten().tolist()
        return (given[0], int(flags[given[0]].item()) - 1) if given else None
