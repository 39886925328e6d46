"""ZeRO stages 0, 1 and 2: whole parameters on every rank, gradients and optimizer state in flat buckets.

A bucket is a run of parameters, last layers first, in one flat buffer; the model's parameters are views of it. Each
rank owns one shard of every bucket.

| stage | gradients | reduced | masters and moments |
|---|---|---|---|
| 0 | whole | all-reduce at the boundary | whole on every rank |
| 1 | whole | reduce-scatter at the boundary | the shard |
| 2 | the shard; whole only while a bucket fills | reduce-scatter in every backward | the shard |

Why not FSDP2 or DistributedDataParallel: docs/adr/0001-flat-buckets.md.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.collectives.shards import Pending, ShardGroup
from engine.model.zero.arrivals import Arrivals, weakly
from engine.model.zero.bucket import Bucket
from engine.model.zero.shards import first_nonfinite, sum_of_squares
from engine.torch_compat import foreach_add_, foreach_copy_

MAX_IN_FLIGHT = 2
"""Reductions that run at once: one on the wire while the next bucket fills. More would hold more buffers."""


class BucketReduction(Arrivals):
    """The `Reduction` role of stages 0 to 2. See the table above.

    ``divisor``: the gradients behind the shards are sums; dividing by it gives what the config asks for (the mean
    over the data-parallel ranks). The engine folds it into the one factor that the optimizer applies.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shard_group: ShardGroup,
        replicate_group: ShardGroup,
        *,
        stage: int,
        reduce_dtype: torch.dtype | None,
        predivide_factor: float,
        divisor: float,
    ) -> None:
        super().__init__()
        self.buckets = list(buckets)
        self.shard_group, self.replicate_group = shard_group, replicate_group
        self.stage = stage
        self.divisor = divisor / predivide_factor
        self._reduce_dtype = reduce_dtype
        self._predivide_factor = predivide_factor
        self._keeps_whole_gradients = stage < 2 or shard_group.size == 1
        self._reducing = False
        self._next = 0
        self._overlaps = True
        self._has_deferred = False
        self._num_rounds = 0
        self._in_flight: deque[tuple[Bucket, Tensor, Tensor, Pending]] = deque()
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._place_of = {
            member.parameter: (bucket_at, member_at)
            for bucket_at, bucket in enumerate(self.buckets)
            for member_at, member in enumerate(bucket.members)
        }
        take = weakly(self._take)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(take, *place))
            for parameter, place in self._place_of.items()
        ]
        self.shards = [shard for bucket in self.buckets for shard, _ in bucket.shards]
        self._start_round()

    # --- collecting ------------------------------------------------------------------------------------------

    def _take(self, bucket_at: int, member_at: int, parameter: Tensor) -> None:
        """The hook of a parameter."""
        bucket = self.buckets[bucket_at]
        member = bucket.members[member_at]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._note_arrival(member.info.index, gradient)
        if member.arrived:
            # A second time in one backward, as reentrant checkpointing of a shared layer makes it. From now on
            # reductions wait for the end of the backward, when all has come; what was sent too early follows.
            self._overlaps = False
            if bucket.launched:
                bucket.late.append((member, gradient))
                return
            self._deposit(bucket)
        else:
            member.arrived = member.in_window = True
            bucket.num_waiting -= 1
        bucket.arrivals.append((member, gradient))
        if bucket.num_waiting == 0:
            self._deposit(bucket)
            if self._reducing and self._overlaps:
                self._advance()

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and parameter in self._place_of:
                self._take(*self._place_of[parameter], parameter)

    @torch.no_grad()
    def _deposit(self, bucket: Bucket) -> None:
        """Put the gradients that have arrived into the bucket's buffer, in one kernel call."""
        if not bucket.arrivals:
            return
        if bucket.collect is None:
            bucket.collect = self._collect_buffer(bucket)
        home = bucket.home_members if bucket.collect is bucket.home else None
        firsts: tuple[list[Tensor], list[Tensor]] = ([], [])
        further: tuple[list[Tensor], list[Tensor]] = ([], [])
        for member, gradient in bucket.arrivals:
            views, gradients = further if member.collected else firsts
            views.append(home[member.info.index] if home is not None else member.view(bucket.collect))
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            member.collected = True
        bucket.arrivals.clear()
        if firsts[0]:
            foreach_copy_(*firsts)
        if further[0]:
            foreach_add_(*further)

    def _collect_buffer(self, bucket: Bucket) -> Tensor:
        """The bucket's own buffer where whole gradients are kept and it is not in use, else a borrowed one."""
        if self._keeps_whole_gradients and bucket.result is None:
            if bucket.home is None:
                bucket.home = torch.zeros_like(bucket.values, dtype=bucket.gradient_dtype)
            return bucket.home
        # the smallest free buffer that is large enough; a new one takes the place of a smaller one, so that buffers
        # for each of many bucket sizes do not add up
        free, numel = self._free.setdefault(bucket.gradient_dtype, []), bucket.values.numel()
        free.sort(key=Tensor.numel)
        fitting = next((index for index, buffer in enumerate(free) if buffer.numel() >= numel), None)
        if fitting is None:
            del free[:1]
            return torch.zeros_like(bucket.values, dtype=bucket.gradient_dtype)
        return free.pop(fitting)[:numel]

    # --- reducing --------------------------------------------------------------------------------------------

    def begin_backward(self, last: bool) -> None:
        self._reducing = last or self.stage == 2
        self._has_deferred |= not self._reducing

    def end_backward(self) -> None:
        """A reducing backward is one round over all buckets, so that ranks agree whatever parameters they touched."""
        if self._reducing:
            self._finish_round()
            self._reducing = False
        else:
            self._end_pass()

    def finish(self) -> None:
        self._reducing = False
        waiting = any(bucket.arrivals or bucket.collect is not None for bucket in self.buckets)
        if self._num_rounds == 0 or self._has_deferred or waiting:
            self._finish_round()
        for bucket in self.buckets:
            for (shard, _), gradient in zip(bucket.shards, bucket.gradients(), strict=True):
                shard.parameter.grad = gradient

    def _end_pass(self) -> None:
        """A backward without reduction is over: its gradients wait in the buckets."""
        for bucket in self.buckets:
            self._deposit(bucket)
            bucket.num_waiting = len(bucket.members)
            for member in bucket.members:
                member.arrived = False

    def _advance(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].num_waiting == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _finish_round(self) -> None:
        for bucket in self.buckets[self._next :]:
            self._deposit(bucket)
            self._launch(bucket)
        while self._in_flight:
            self._complete()
        self._num_rounds += 1
        self._has_deferred = False
        self._start_round()
        late = [bucket for bucket in self.buckets if bucket.late]
        for bucket in late:
            bucket.arrivals, bucket.late = bucket.late, []
        if late:
            self._finish_round()

    def _start_round(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.num_waiting = len(bucket.members)
            bucket.launched = False
            for member in bucket.members:
                member.arrived = member.collected = False

    def _launch(self, bucket: Bucket) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._complete()
        collected = bucket.collect if bucket.collect is not None else self._collect_buffer(bucket)
        bucket.collect = None
        bucket.launched = True
        for member in bucket.members:
            if not member.collected:
                collected[member.offset : member.stop].zero_()
        collected[bucket.members[-1].stop :].zero_()  # padding: the buffer may have served a bucket that had none here
        if self._predivide_factor != 1.0:
            collected.div_(self._predivide_factor)
        self._in_flight.append((bucket, collected, *self._send(bucket, collected)))

    def _send(self, bucket: Bucket, collected: Tensor) -> tuple[Tensor, Pending]:
        """What travels, where the sums will be, and the reduction on its way."""
        wire = collected if self._reduce_dtype in (None, collected.dtype) else collected.to(self._reduce_dtype)
        if self.shard_group.size > 1:
            what = f"reducing gradients of {bucket.name}"
            return wire, self.shard_group.reduce_scatter(wire, bucket.bounds, what)
        return wire, self.replicate_group.all_reduce(wire, f"summing gradients of {bucket.name}")

    def _complete(self) -> None:
        bucket, collected, wire, pending = self._in_flight.popleft()
        pending.wait()
        own = wire[bucket.own]
        if self.shard_group.size > 1 and self.replicate_group.size > 1:
            self.replicate_group.all_reduce(own).wait()
        if wire is not collected:
            own = collected[bucket.own].copy_(own)
        if bucket.result is not None:
            bucket.result.add_(own)
        elif collected is bucket.home:
            bucket.result = own
            return
        else:
            if bucket.home is None:
                bucket.home = torch.empty_like(own)
            bucket.result = bucket.home.copy_(own)
        self._give_back(collected)

    def _give_back(self, buffer: Tensor) -> None:
        """``buffer`` may be the front of a larger one; all of it is free again."""
        whole = torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(buffer.untyped_storage())
        self._free.setdefault(buffer.dtype, []).append(whole)

    # --- after the reduction -----------------------------------------------------------------------------------

    @torch.no_grad()
    def sum_of_squares(self, exact: bool = False) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].values.device if self.buckets else None)
        for bucket in self.buckets:
            assert bucket.result is not None
            total.add_(sum_of_squares(bucket.result, exact), alpha=1.0 / bucket.num_copies)
        return total / self.replicate_group.size

    def first_nonfinite(self) -> int | None:
        return first_nonfinite(self.shards)

    def unreduced(self) -> set[int]:
        return set()

    def untouched(self) -> list[int]:
        return [m.info.index for bucket in self.buckets for m in bucket.members if not m.in_window]

    @torch.no_grad()
    def adopt_gradients(self, indices: set[int]) -> None:
        for bucket in self.buckets:
            for member in bucket.members:
                member.in_window |= member.info.index in indices
            for shard, offset in bucket.shards:
                if shard.info.index in indices and bucket.result is not None and shard.parameter.grad is not None:
                    held = bucket.result[offset : offset + shard.parameter.numel()]
                    if held.data_ptr() != shard.parameter.grad.data_ptr():
                        held.copy_(shard.parameter.grad.view(-1))

    def drop_gradients(self, indices: set[int]) -> None:
        for shard in self.shards:
            if shard.info.index in indices:
                shard.parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        pending = []
        for bucket in self.buckets:
            if bucket.master.data_ptr() != bucket.values[bucket.own].data_ptr():
                bucket.values[bucket.own].copy_(bucket.master)
            what = f"gathering the updated {bucket.name}"
            pending.append(self.shard_group.all_gather(bucket.values, bucket.bounds, what))
        for gather in pending:
            gather.wait()
        # parameters alias the buckets through .data, so autograd must be told that they changed
        torch.autograd.graph.increment_version([m.parameter for bucket in self.buckets for m in bucket.members])

    @torch.no_grad()
    def adopt_values(self) -> None:
        for bucket in self.buckets:
            if bucket.master.data_ptr() != bucket.values[bucket.own].data_ptr():
                bucket.master.copy_(bucket.values[bucket.own])

    def zero_gradients(self) -> None:
        self._reducing = self._has_deferred = False
        self._num_rounds = 0
        self._scales.clear()
        while self._in_flight:
            self._complete()
        for bucket in self.buckets:
            if bucket.collect is not None and bucket.collect is not bucket.home:
                self._give_back(bucket.collect)
            bucket.arrivals.clear()
            bucket.late.clear()
            bucket.collect = bucket.result = bucket.flat_gradients = None
            for member in bucket.members:
                member.in_window = False
        for shard in self.shards:
            shard.parameter.grad = None
        self._start_round()

    def defers(self) -> bool:
        return self.stage < 2  # stage 2 never keeps whole gradients

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
