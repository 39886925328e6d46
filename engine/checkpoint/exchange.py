"""What saving and loading need from the other ranks: gather to rank 0 and broadcast from it.

Everything collective goes through `Exchange.collect` and `Exchange.on_first`, so that a failure on any rank becomes
the same `CheckpointError` on all of them and nobody waits for a rank that gave up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from engine.checkpoint.errors import CheckpointError, attempt, summarise
from engine.collectives.ledger import Account, Ledger
from engine.collectives.objects import ObjectGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Exchange(ABC):
    """Two collectives on small Python objects. All ranks call them in the same order."""

    rank: int
    world_size: int

    @abstractmethod
    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in rank order, on rank 0; None elsewhere."""

    @abstractmethod
    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""

    def collect(self, action: Callable[[], T], doing: str) -> list[T] | None:
        """Run ``action`` on every rank and gather its values on rank 0 (None elsewhere).

        Where it failed on any rank, every rank raises the same `CheckpointError`, naming rank and cause; ``doing``
        opens the message ("Saving 'global_step7'").
        """
        gathered = self.gather(attempt(action))
        failure = summarise([failed for _, failed in gathered]) if gathered is not None else None
        message = self.broadcast((failure and f"{doing} failed: {failure}",))[0]
        if message is not None:
            raise CheckpointError(message)
        return None if gathered is None else [value for value, _ in gathered]

    def on_first(self, action: Callable[[], T], doing: str) -> T:
        """Run ``action`` on rank 0 only and return its value on every rank; its failure is raised on every rank."""
        outcome = None
        if self.rank == 0:
            found, failure = attempt(action)
            outcome = found, failure and f"{doing} failed: {failure}"
        value, message = self.broadcast(outcome)
        if message is not None:
            raise CheckpointError(message)
        return value  # type: ignore[return-value]  # no failure: the value is the action's


class Alone(Exchange):
    """One process, no process group."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: T | None) -> T:
        return value  # type: ignore[return-value]


class TorchExchange(Exchange):
    """Over a `torch.distributed` process group (None: the default one), gloo or NCCL; counted in ``ledger``."""

    def __init__(self, group: ProcessGroup | None = None, ledger: Ledger | Account | None = None) -> None:
        self._objects = ObjectGroup(group, ledger)
        self.rank, self.world_size = self._objects.rank, self._objects.size

    def gather(self, value: Any) -> list[Any] | None:
        return self._objects.gather(value)

    def broadcast(self, value: T | None) -> T:
        shared: T = self._objects.broadcast(value)
        return shared


def exchange_of(group: ProcessGroup | Exchange | None, rank: int, world_size: int) -> Exchange:
    """The `Exchange` among the ``world_size`` ranks of ``group``, of which this is ``rank``.

    Raises `CheckpointError` where the caller's numbers are not the group's: a save among the wrong ranks would hang.
    """
    if isinstance(group, Exchange):
        exchange: Exchange = group
    elif group is None and world_size == 1:
        exchange = Alone()
    else:
        exchange = TorchExchange(group)
    if (exchange.rank, exchange.world_size) != (rank, world_size):
        raise CheckpointError(
            f"A checkpoint call came as rank {rank} of {world_size}, but its process group says rank {exchange.rank} "
            f"of {exchange.world_size}. Pass the group that all ranks of the run belong to."
        )
    return exchange
