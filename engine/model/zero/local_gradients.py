"""Stage 0 for optimizers that reduce something else than gradients: the 1-bit family (engine/optim/compressed.py).

The optimizer says before each window which buckets stay local. Those are collected as ever and not sent; each rank's
gradient then stands for the sum over ranks as N times its own, so that whatever divides sums divides it rightly.

The norm of gradients that no rank can see averaged is taken as the root of the mean of the ranks' squared norms: one
number, the same everywhere, never below the norm of the mean. So all ranks clip by one factor.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.collectives.shards import Pending
from engine.model.zero.bucket import Bucket
from engine.model.zero.buckets import BucketReduction


class _AtOnce:
    def wait(self) -> None:
        pass


class LocalGradients(BucketReduction):
    """The compressed `Reduction`. ``stays_local`` is asked about a bucket; its answer may change between windows."""

    stays_local: Callable[[Bucket], bool] = staticmethod(lambda bucket: False)

    def unreduced(self) -> set[int]:
        local = [bucket for bucket in self.buckets if self.stays_local(bucket)]
        return {shard.info.index for bucket in local for shard, _ in bucket.shards}

    def _send(self, bucket: Bucket, collected: Tensor) -> tuple[Tensor, Pending]:
        if not self.stays_local(bucket):
            return super()._send(bucket, collected)
        return collected.mul_(self.replicate_group.size), _AtOnce()
