"""Stopping in good order: the first Ctrl-C or SIGTERM asks, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAUNCHER_PID = "PTRAIN_LAUNCHER_PID"
"""Set by the launcher for its ranks."""


class StopRequest:
    """While entered, `signal` holds the first SIGINT or SIGTERM that came, else None; a second one exits at once.

    Python calls handlers in the main thread only, so it must be entered there. Ranks may be asked at different
    steps, or only some of them: the engine agrees on one step.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._notify: Callable[[signal.Signals], None] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def tell(self, notify: Callable[[signal.Signals], None]) -> None:
        """Call `notify` with the signal: at once if it has come, else from the handler, so it must do next to nothing.

        A step that is under way then still hears of it, and not only the next one.
        """
        self._notify = notify
        if self.signal is not None:
            notify(self.signal)

    @property
    def exit_code(self) -> int:
        """128 + signal number, as shells report it; 0 if nobody asked."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back from it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if self._notify is not None:
            self._notify(self.signal)
        if os.environ.get("RANK", "0") == "0":
            # Not print: a handler may interrupt a write to the same buffered stream.
            os.write(2, f"\n{self.signal.name}: finishing the step and saving; once more to stop at once\n".encode())


def end_with_launcher(poll_seconds: float = 1.0, grace_seconds: float = 60.0) -> None:
    """In a launched rank: when the launcher is killed, stop in good order, and without order after the grace.

    Nobody else would end the ranks of a launcher that got SIGKILL, be it before this call. Does nothing in other
    processes.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or (os.getppid() != int(launcher) and _is_alive(int(launcher))):
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(poll_seconds)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and alive
    return True
