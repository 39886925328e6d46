"""Reduce-scatter and all-gather of a flat buffer, in place, cut at any bounds.

On gloo both are point-to-point exchanges into buffers that are kept: gloo's own reduce_scatter_tensor and
all_gather_into_tensor take two to four times as long for the same bytes (docs/benchmarks). Elsewhere the backend's
own collective runs in place, as NCCL documents it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.collectives.ledger import Ledger
from engine.collectives.stall import Ticket, watch
from engine.mesh import Mesh


class Pending(Protocol):
    """A collective on its way. After `wait` its result may be read (on the current stream)."""

    def wait(self) -> None: ...


class Transfer(Pending, Protocol):
    """One tensor on its way to one rank."""

    def is_over(self) -> bool: ...


class _Done:
    def wait(self) -> None:
        pass


class _Works:
    """Several point-to-point transfers; received parts are then added to `into`."""

    def __init__(
        self,
        ticket: Ticket,
        works: Sequence[dist.Work | None],
        parts: Sequence[Tensor] = (),
        into: Tensor | None = None,
    ) -> None:
        self.ticket, self.works, self.parts, self.into = ticket, works, parts, into

    def wait(self) -> None:
        with watch.wait(self.ticket):
            for work in self.works:
                if work is not None:
                    work.wait()
        for part in self.parts:
            assert self.into is not None
            self.into.add_(part)
        self.works, self.parts = (), ()

    def is_over(self) -> bool:
        return all(work is None or work.is_completed() for work in self.works)


class ShardGroup:
    """The ranks among which flat buffers are cut, one shard each, in rank order.

    ``bounds`` has ``size + 1`` entries; shard ``r`` of a buffer is ``[bounds[r], bounds[r + 1])``. A group of None is
    one rank: every call returns at once. ``what`` says what a call is for: ranks that come to different calls are told
    apart by it (engine/collectives/stall.py), and on gloo their messages never meet.
    """

    def __init__(self, group: dist.ProcessGroup | None, axis: str, ledger: Ledger) -> None:
        self.group, self.axis, self.ledger = group, axis, ledger
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        # one backend ("gloo") or one for each kind of device ("cpu:gloo,cuda:nccl")
        pairs = [] if group is None else dist.get_backend_config(group).split(",")
        self._backends = {device: backend for device, _, backend in (pair.partition(":") for pair in pairs)}
        self._peers = [r for r in range(self.size) if r != self.rank]
        self._global = [] if group is None else dist.get_process_group_ranks(group)
        self._scratch: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    @classmethod
    def of(cls, mesh: Mesh, axis: str, ledger: Ledger) -> ShardGroup:
        """The group of a mesh axis, of the ``world``, or of all ranks for ``control``."""
        return cls(mesh.control_group if axis == "control" else mesh.group(axis), axis, ledger)

    @classmethod
    def alone(cls) -> ShardGroup:
        return cls(None, "", Ledger())

    def even_bounds(self, numel: int) -> list[int]:
        """Cut ``numel`` elements, which ``size`` divides, into equal shards."""
        return [numel // self.size * r for r in range(self.size + 1)]

    def ticket(self, what: str) -> Ticket:
        """This rank comes to the collective ``what``."""
        return watch.issue(what, self._global, self.group)

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int], what: str = "reducing gradients") -> Pending:
        """Sum ``flat`` over the ranks; the sum of this rank's shard replaces it in ``flat``, the rest is undefined."""
        if self.group is None or self.size == 1:
            return _Done()
        own = flat[bounds[self.rank] : bounds[self.rank + 1]]
        self.ledger.add(self.axis, "reduce_scatter", (flat.numel() - own.numel()) * flat.element_size())
        ticket = self.ticket(what)
        with watch.wait(ticket):
            if self._is_on_gloo(flat):
                tag = zlib.crc32(what.encode()) >> 1
                parts = [self._borrow(own) for _ in self._peers] if own.numel() else []
                works = [self._receive(part, peer, tag) for part, peer in zip(parts, self._peers, strict=False)]
                works += [self._send(flat[bounds[peer] : bounds[peer + 1]], peer, tag) for peer in self._peers]
                return _Returning(self, _Works(ticket, works, parts, own), parts)
            if _even(bounds):
                return _Works(ticket, [dist.reduce_scatter_tensor(own, flat, group=self.group, async_op=True)])
            shards = enumerate(flat[bounds[r] : bounds[r + 1]] for r in range(self.size))
            reductions = [dist.reduce(s, self._global[r], group=self.group, async_op=True) for r, s in shards]
            return _Works(ticket, reductions)

    def all_gather(self, flat: Tensor, bounds: Sequence[int], what: str = "gathering parameters") -> Pending:
        """Fill ``flat`` with every rank's shard; this rank's own is in its place already."""
        if self.group is None or self.size == 1:
            return _Done()
        own = flat[bounds[self.rank] : bounds[self.rank + 1]]
        self.ledger.add(self.axis, "all_gather", own.numel() * own.element_size() * (self.size - 1))
        ticket = self.ticket(what)
        with watch.wait(ticket):
            if self._is_on_gloo(flat):
                tag = zlib.crc32(what.encode()) >> 1
                works = [self._receive(flat[bounds[peer] : bounds[peer + 1]], peer, tag) for peer in self._peers]
                works += [self._send(own, peer, tag) for peer in self._peers]
                return _Works(ticket, works)
            if _even(bounds):
                return _Works(ticket, [dist.all_gather_into_tensor(flat, own, group=self.group, async_op=True)])
            shards = enumerate(flat[bounds[r] : bounds[r + 1]] for r in range(self.size))
            broadcasts = [dist.broadcast(s, self._global[r], group=self.group, async_op=True) for r, s in shards]
            return _Works(ticket, broadcasts)

    def all_to_all(self, outgoing: Tensor, incoming: Tensor, what: str = "exchanging signs") -> Pending:
        """Row ``r`` of ``outgoing`` (one row a rank) goes to rank ``r``; row ``r`` of ``incoming`` came from it."""
        if self.group is None or self.size == 1:
            incoming.copy_(outgoing)
            return _Done()
        row_bytes = outgoing[0].numel() * outgoing.element_size()
        self.ledger.add(self.axis, "all_to_all", row_bytes * (self.size - 1))
        ticket = self.ticket(what)
        with watch.wait(ticket):
            if not self._is_on_gloo(outgoing):
                return _Works(ticket, [dist.all_to_all_single(incoming, outgoing, group=self.group, async_op=True)])
            tag = zlib.crc32(what.encode()) >> 1
            works = [self._receive(incoming[peer], peer, tag) for peer in self._peers]
            works += [self._send(outgoing[peer], peer, tag) for peer in self._peers]
            incoming[self.rank].copy_(outgoing[self.rank])
            return _Works(ticket, works)

    def rotate(self, outgoing: Tensor, incoming: Tensor, what: str = "passing on a slice") -> Pending:
        """``outgoing`` goes to the next rank of the ring, ``incoming`` comes from the one before. Both contiguous."""
        self.ledger.add(self.axis, "send", outgoing.numel() * outgoing.element_size())
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ticket = self.ticket(what)
        with watch.wait(ticket):
            if self._is_on_gloo(outgoing):
                tag = zlib.crc32(what.encode()) >> 1
                return _Works(ticket, [self._receive(incoming, before, tag), self._send(outgoing, following, tag)])
            operations = [
                dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=following),
                dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=before),
            ]
            return _Works(ticket, dist.batch_isend_irecv(operations))

    def all_reduce(self, flat: Tensor, what: str = "summing gradients") -> Pending:
        """Sum ``flat`` over the ranks, in place."""
        if self.group is None or self.size == 1:
            return _Done()
        self.count_all_reduce(flat)
        ticket = self.ticket(what)
        with watch.wait(ticket):
            return _Works(ticket, [dist.all_reduce(flat, group=self.group, async_op=True)])

    def count_all_reduce(self, flat: Tensor) -> None:
        """For an all-reduce that somebody else runs."""
        self.ledger.add(self.axis, "all_reduce", 2 * (self.size - 1) * flat.numel() * flat.element_size() // self.size)

    def sum(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """``tensor`` summed over the ranks, in place or by way of ``device`` (all ranks must use one backend)."""
        travelling = tensor if device is None else tensor.to(device)
        self.all_reduce(travelling, "summing norms").wait()
        return travelling.to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Give every rank the values of rank ``source`` of the group."""
        if self.group is None or self.size == 1:
            return
        numel = tensor.numel() * (self.size - 1) if self.rank == source else 0
        self.ledger.add(self.axis, "broadcast", numel * tensor.element_size())
        with watch.wait(self.ticket(f"giving rank {source}'s values to all")):
            dist.broadcast(tensor, self._global[source], group=self.group)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], what: str = "exchanging"
    ) -> None:
        """Send tensors to peers and receive others, pairs of (contiguous tensor, rank in this group), all at once.

        What one rank sends to another it receives in the same order.
        """
        for tensor, _ in sends:
            self.ledger.add(self.axis, "send", tensor.numel() * tensor.element_size())
        operations = [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor, peer in receives]
        operations += [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for tensor, peer in sends]
        with watch.wait(self.ticket(what)):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def send(self, tensor: Tensor, peer: int, what: str) -> Transfer:
        """``tensor`` (contiguous, not changed until the wait is over) goes to rank ``peer`` of the group, which calls
        `receive` with the same ``what``."""
        self.ledger.add(self.axis, "send", tensor.numel() * tensor.element_size())
        ticket = watch.issue(what, (self._global[self.rank], self._global[peer]), self.group)
        with watch.wait(ticket):
            return _Works(ticket, [self._send(tensor, peer, zlib.crc32(what.encode()) >> 1)])

    def receive(self, tensor: Tensor, peer: int, what: str) -> Transfer:
        """``tensor`` (contiguous) is what rank ``peer`` sends; complete after the wait."""
        ticket = watch.issue(what, (self._global[self.rank], self._global[peer]), self.group)
        with watch.wait(ticket):
            return _Works(ticket, [self._receive(tensor, peer, zlib.crc32(what.encode()) >> 1)])

    def _is_on_gloo(self, tensor: Tensor) -> bool:
        return self._backends.get(tensor.device.type) == "gloo"

    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work | None:
        return dist.isend(tensor, self._global[peer], group=self.group, tag=tag) if tensor.numel() else None

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work | None:
        return dist.irecv(tensor, self._global[peer], group=self.group, tag=tag) if tensor.numel() else None

    def _borrow(self, like: Tensor) -> Tensor:
        free = self._scratch.setdefault((like.dtype, like.numel()), [])
        return free.pop() if free else torch.empty_like(like)

    def _give_back(self, parts: Sequence[Tensor]) -> None:
        for part in parts:
            self._scratch[part.dtype, part.numel()].append(part)


class _Returning:
    """Returns scratch buffers once the collective is over."""

    def __init__(self, owner: ShardGroup, inner: _Works, parts: Sequence[Tensor]) -> None:
        self.owner, self.inner, self.scratch = owner, inner, parts

    def wait(self) -> None:
        self.inner.wait()
        self.owner._give_back(self.scratch)
        self.scratch = ()


def _even(bounds: Sequence[int]) -> bool:
    return all(b - a == bounds[1] - bounds[0] for a, b in itertools.pairwise(bounds))
