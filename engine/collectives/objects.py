"""Small Python objects between the live ranks of one job: what saving and loading agree on, and figures of a run.

Pickle is used between ranks only, never for anything on disk.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed as dist

from engine.collectives.ledger import Account, Ledger


class ObjectGroup:
    """The ranks of a process group (None: the default one), gloo or NCCL. Bytes are counted without the padding with
    which torch makes the objects of all ranks equally long."""

    def __init__(self, group: dist.ProcessGroup | None = None, ledger: Ledger | Account | None = None) -> None:
        self._group = group
        self._ledger = ledger
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in rank order, on the group's first rank; None elsewhere."""
        payload = pickle.dumps(value)
        payloads: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._count("gather_object", len(payload) if self.rank else 0)
        dist.gather_object(payload, payloads, group=self._group, group_dst=0)
        return None if payloads is None else [pickle.loads(each) for each in payloads]

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        payload = pickle.dumps(value) if self.rank == 0 else None
        holder = [payload]
        self._count("broadcast_object", len(payload) * (self.size - 1) if payload is not None else 0)
        dist.broadcast_object_list(holder, group=self._group, group_src=0)
        assert holder[0] is not None
        return pickle.loads(holder[0])

    def _count(self, operation: str, sent_bytes: int) -> None:
        if self._ledger is not None and self.size > 1:
            self._ledger.add("world", operation, sent_bytes)

    def gather_everywhere(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank."""
        payload = pickle.dumps(value)
        self._count("all_gather_object", len(payload) * (self.size - 1))
        payloads: list[Any] = [None] * self.size
        dist.all_gather_object(payloads, payload, group=self._group)
        return [pickle.loads(each) for each in payloads]
