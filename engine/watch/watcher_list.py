"""The watchers of one rank as one watcher, with failures kept away from training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.contracts import StepReport, Watcher

if TYPE_CHECKING:
    from engine.plan import Plan

logger = logging.getLogger("engine.watch")


class WatcherList(Watcher):
    """Calls its watchers in order. One that raises is reported once, closed and left out; training goes on."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self._watchers = list(watchers)

    def __iter__(self) -> Iterator[Watcher]:
        return iter(tuple(self._watchers))

    def __len__(self) -> int:
        return len(self._watchers)

    def append(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    def on_start(self, plan: Plan) -> None:
        self._each("on_start", lambda watcher: watcher.on_start(plan))

    def on_step(self, report: StepReport) -> None:
        self._each(f"on_step of step {report.step}", lambda watcher: watcher.on_step(report))

    def on_evaluation(self, report: StepReport | None, metrics: Mapping[str, float]) -> None:
        self._each("on_evaluation", lambda watcher: watcher.on_evaluation(report, metrics))

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        self._each("write_events", lambda watcher: watcher.write_events(events))

    def close(self) -> None:
        self._each("close", lambda watcher: watcher.close())
        self._watchers.clear()

    def _each(self, occasion: str, call: Callable[[Watcher], None]) -> None:
        for watcher in tuple(self._watchers):
            try:
                call(watcher)
            except Exception as error:
                self._watchers.remove(watcher)
                logger.warning(
                    "%s failed in %s and is left out from here on; training continues. %s: %s",
                    type(watcher).__name__,
                    occasion,
                    type(error).__name__,
                    error,
                )
                if occasion != "close":
                    self._close_quietly(watcher)

    @staticmethod
    def _close_quietly(watcher: Watcher) -> None:
        """The failure was told already; closing is only an attempt to keep what had been written."""
        try:
            watcher.close()
        except Exception:
            logger.debug("closing %s failed as well", type(watcher).__name__, exc_info=True)
