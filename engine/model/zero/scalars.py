"""0-dim parameters at stage 3. FSDP2 cuts parameters along their first dimension, and these have none: they stay whole
on every rank, as at stage 1, beside the sharded rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engine.model.zero.buckets import BucketReduction
from engine.model.zero.fully_sharded import FullyShardedReduction


class ShardedWithScalars:
    """The `Reduction` role of stage 3 for a model with trained 0-dim parameters: both parts, one after the other."""

    def __init__(self, sharded: FullyShardedReduction, scalars: BucketReduction) -> None:
        self._sharded, self._scalars = sharded, scalars
        self._parts = (sharded, scalars)
        self.divisor = sharded.divisor
        self.shards = [*sharded.shards, *scalars.shards]

    def begin_backward(self, last: bool) -> None:
        for part in self._parts:
            part.begin_backward(last)

    def end_backward(self) -> None:
        for part in self._parts:
            part.end_backward()

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        given = list(parameters)
        for part in self._parts:
            part.collect(given)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def sum_of_squares(self, exact: bool = False) -> Tensor:
        return self._sharded.sum_of_squares(exact) + self._scalars.sum_of_squares(exact)

    def first_nonfinite(self) -> int | None:
        found = [index for part in self._parts if (index := part.first_nonfinite()) is not None]
        return min(found, default=None)

    def inspect(self, next_window: bool) -> None:
        for part in self._parts:
            part.inspect(next_window)

    def first_nonfinite_arrival(self) -> int | None:
        found = [index for part in self._parts if (index := part.first_nonfinite_arrival()) is not None]
        return min(found, default=None)

    def unreduced(self) -> set[int]:
        return set()

    def untouched(self) -> list[int]:
        return self._sharded.untouched() + self._scalars.untouched()

    def scales(self) -> set[float | None]:
        return self._sharded.scales() | self._scalars.scales()

    def adopt_gradients(self, indices: set[int]) -> None:
        for part in self._parts:
            part.adopt_gradients(indices)

    def drop_gradients(self, indices: set[int]) -> None:
        for part in self._parts:
            part.drop_gradients(indices)

    @torch.no_grad()
    def publish(self) -> None:
        for part in self._parts:
            part.publish()

    def adopt_values(self) -> None:
        for part in self._parts:
            part.adopt_values()

    def zero_gradients(self) -> None:
        for part in self._parts:
            part.zero_gradients()

    def defers(self) -> bool:
        return False

    def close(self) -> None:
        for part in self._parts:
            part.close()
