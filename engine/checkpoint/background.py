"""Saves that are written while training goes on."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.exchange import Exchange
from engine.checkpoint.saving import Prepared

log = logging.getLogger("engine")


class BackgroundWriter:
    """Completes one save at a time on a thread of its own.

    ``exchange`` is the thread's alone: collectives of two threads on one process group would meet each other's.
    A failure is logged by rank 0 when it happens; the folder is then as it was.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        # The interpreter waits for the threads of an executor when it exits.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self.host: dict[Any, Tensor] = {}
        """Memory for the values of the save under way."""

    def submit(self, save: Prepared) -> None:
        """Write ``save``, whose values are detached from training, and return at once."""
        self.wait()
        self._pending = self._thread.submit(self._complete, save)

    @property
    def is_writing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def wait(self) -> CheckpointError | None:
        """Wait for the save under way, if there is one. Returns what it failed with, the same on all ranks."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        error = pending.exception()
        if error is None or isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"a checkpoint could not be written in the background: {error}")

    def _complete(self, save: Prepared) -> Path:
        try:
            return save.complete(self._exchange)
        except Exception as error:
            if self._exchange.rank == 0:
                log.error("the checkpoint is not saved, training goes on: %s", error)
            raise
