"""Before a save or a load: whether all ranks have called it.

A collective call that only some ranks make would hang for as long as the process group allows. The ranks meet at the
job's store instead, which one rank can ask alone and which answers within a limit.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import Store

from engine.contracts import EngineError

_GRACE_SECONDS = 0.5
"""How long a rank that gives up can still be seen by those that give up at the same time."""


class RollCall:
    """One meeting place of the ranks of a run. ``store`` None (one process, or a job without a store): no calls."""

    def __init__(self, store: Store | None, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store = store if world_size > 1 else None
        self._rank, self._world_size, self._timeout_seconds = rank, world_size, timeout_seconds
        self._num_calls = 0
        self._place = ""
        if self._store is not None:
            # Engines are built by all ranks in one order, so this number is the same on all.
            self._place = f"checkpoint{self._store.add(f'checkpoints/of_rank{rank}', 1)}"

    def call(self, what: str, *others: str) -> None:
        """Wait until every rank has called ``what``. Raises EngineError naming those that did not come in time.

        ``others``: what they may have called instead. After a failure the next call meets them at the same place.
        """
        if self._store is None:
            return
        self._store.set(self._key(what, self._rank), "here")
        everybody = [self._key(what, rank) for rank in range(self._world_size)]
        try:
            self._store.wait(everybody, timedelta(seconds=self._timeout_seconds))
        except RuntimeError:  # whatever the kind of store says after the time
            came = [rank for rank in range(self._world_size) if self._store.check([everybody[rank]])]
            if len(came) < self._world_size:
                message = self._absent(what, came, others)
                time.sleep(_GRACE_SECONDS)
                self._store.delete_key(everybody[self._rank])
                raise EngineError(message) from None
        self._num_calls += 1
        if self._num_calls > 1:
            self._store.delete_key(self._key(what, self._rank, self._num_calls - 2))

    def _absent(self, what: str, came: list[int], others: tuple[str, ...]) -> str:
        assert self._store is not None
        absent = [rank for rank in range(self._world_size) if rank not in came]
        elsewhere = [
            f"{o}() by rank {rank}" for o in others for rank in absent if self._store.check([self._key(o, rank)])
        ]
        instead = f" ({', '.join(elsewhere)} instead)" if elsewhere else ""
        return (
            f"{what}() was called by {_ranks(came)} and not by {_ranks(absent)}{instead} within "
            f"{self._timeout_seconds:g} s: all ranks must call it, so take it out of `if rank == 0`. If they are only "
            "late, raise checkpoint.rank_timeout_seconds"
        )

    def _key(self, what: str, rank: int, number: int | None = None) -> str:
        return f"{self._place}/{self._num_calls if number is None else number}/{what}/{rank}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
