"""Starts ranks on this machine as fresh interpreters, with the process layer of torch's elastic launcher.

Elastic's agent above that layer restarts and rescales groups of nodes; a launch here is one node without restarts, and
the agent would end its ranks with SIGTERM, which here means "finish the step and save". So this file keeps watch itself
(https://docs.pytorch.org/docs/stable/elastic/multiprocessing.html). For several nodes use torchrun or SLURM.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from engine.launch.outcome import FAILURE_DIRECTORY, judge, read_consequences, read_messages
from engine.launch.signals import LAUNCHER_PID
from engine.launch.threads import thread_environment

POLL_SECONDS = 0.05
KILL_SECONDS = 5.0
WORKER = (sys.executable, "-P", "-m", "engine.cli")
"""-P: a folder named `engine` in the working directory must not win over this package."""


def launch(
    nproc: int,
    argv: Sequence[str],
    *,
    worker: Sequence[str] = WORKER,
    failure_grace_seconds: float = 5.0,
    stop_grace_seconds: float = 60.0,
) -> int:
    """Run `worker *argv` as `nproc` ranks and return the exit code; prints why, where it is not 0.

    SIGINT and SIGTERM are passed on once; a second one kills the ranks. When a rank fails, the others get
    `failure_grace_seconds` (after a stop request `stop_grace_seconds`) to end by themselves, then they are killed:
    no process is left behind. Standard output of ranks above 0 is dropped, standard error passes.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    with tempfile.TemporaryDirectory(prefix="ptrain_") as directory, _Signals() as signals:
        # The store lives here and not on rank 0: its port is bound before anybody is told of it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        failures = Path(directory) / "failures"
        failures.mkdir()
        shared = {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            FAILURE_DIRECTORY: str(failures),
            LAUNCHER_PID: str(os.getpid()),
            **_default_environment(nproc),
        }
        context = start_processes(
            name="ptrain",
            entrypoint=worker[0],
            args=dict.fromkeys(range(nproc), (*worker[1:], *argv)),
            envs={rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)},
            logs_specs=DefaultLogsSpecs(log_dir=directory, redirects=dict.fromkeys(range(1, nproc), Std.OUT)),
        )
        pids = dict(context.pids())
        exit_codes: dict[int, int] = {}
        try:
            exit_codes = _watch(pids, signals, failure_grace_seconds, stop_grace_seconds)
        finally:
            if set(exit_codes.values()) != {0} or len(exit_codes) < nproc:
                _kill(pids.values())
            context.close(signal.SIGKILL, timeout=5)
        if signals.count > 1:
            return 128 + signals.last
        messages, consequences = read_messages(failures, nproc), read_consequences(failures, nproc)
        outcome = judge(nproc, exit_codes, messages, signals.first, consequences)
    for line in outcome.lines:
        print(f"ptrain: {line}", file=sys.stderr)
    return outcome.exit_code


class _Signals:
    """Notes signals while entered; the watch passes them on, because a handler must not do much.

    SIGHUP (the terminal was closed) stops like SIGTERM, unless `nohup` has told to ignore it.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.last: int = 0
        self.count = 0
        self._previous: dict[int, Any] = {}
        self._elastic: str | None = None

    def __enter__(self) -> _Signals:
        # Elastic would install its own handlers, which end the ranks; it cannot be told "none", so it gets a rare one.
        self._elastic = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            previous = signal.getsignal(number)
            self._previous[number] = previous if previous is not None else signal.SIG_DFL
            if number != signal.SIGQUIT:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._elastic is None:
            os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        else:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = self._elastic

    def _handle(self, number: int, frame: FrameType | None) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        self.first = self.first or signal.Signals(number)
        self.last = number
        self.count += 1


def _watch(
    pids: Mapping[int, int], signals: _Signals, failure_grace_seconds: float, stop_grace_seconds: float
) -> dict[int, int]:
    """Wait until every rank has ended or must be killed. Returns the exit codes of those that ended, in order."""
    running = dict(pids)
    exit_codes: dict[int, int] = {}
    passed_on = 0
    deadline: float | None = None
    while running:
        ended = {rank: code for rank, pid in running.items() if (code := _exit_code(pid)) is not None}
        # A dead peer makes others fail; where both are seen at once, the death is the cause.
        for rank in sorted(ended, key=lambda rank: ended[rank] >= 0):
            exit_codes[rank] = ended[rank]
            del running[rank]
        if signals.count > 1 or (deadline is not None and time.monotonic() > deadline):
            break
        if signals.count > passed_on and signals.first is not None:
            passed_on = signals.count
            for pid in running.values():
                os.kill(pid, signals.first)
        if deadline is None and any(exit_codes.values()):
            deadline = time.monotonic() + (stop_grace_seconds if signals.first else failure_grace_seconds)
        if running:
            time.sleep(POLL_SECONDS)
    return exit_codes


def _exit_code(pid: int) -> int | None:
    """Exit code of a child that has ended, else None. It is not reaped, so that its pid stays taken until `_kill`."""
    if not hasattr(os, "waitid"):
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill(pids: Collection[int]) -> None:
    """Kill the process groups of the ranks: also children of a rank that is gone, such as data workers."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    give_up = time.monotonic() + KILL_SECONDS
    for pid in pids:
        with suppress(ChildProcessError):
            while _exit_code(pid) is None and time.monotonic() < give_up:
                time.sleep(POLL_SECONDS)


def _default_environment(nproc: int) -> dict[str, str]:
    """Threads share the cores; PYTHONPATH lets workers find this checkout."""
    environment = thread_environment(nproc)
    root = str(Path(__file__).resolve().parents[2])
    if Path(root).name not in ("site-packages", "dist-packages"):
        present = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = root + (os.pathsep + present if present else "")
    return environment
