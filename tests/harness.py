"""Ranks for tests: gloo processes on loopback that stay alive between tests.

This is the only file that knows how ranks start. A test asks the `ranks` fixture for a world and sends it a function::

    def sum_of_ranks() -> float:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks):
        assert ranks(3).run(sum_of_ranks) == [3.0, 3.0, 3.0]

The function goes over by name, so it must stand at the top level of a module. It runs on every rank, in a fresh process
group and with fresh random seeds; its results come back in rank order. Importing torch is what a rank costs, so one set
of processes serves every world size: a world of 2 is the first two of them.

A rank is a fresh interpreter. It talks to the parent over a socket pair and to its peers over gloo on the loopback
interface; they meet at a file, so no port is chosen by hand. A rank cannot outlive its parent: it watches the read end
of a pipe whose only write end the parent holds.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""How long the other ranks may still take after one has failed, before they are killed."""
STACK_SECONDS = 0.5
"""How long a silent rank gets to write its stack down."""
RELEASE = b"leave the process group"
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class RankFailed(Exception):
    """A rank died, did not answer in time, or raised something that cannot be sent. Its message names the rank."""


@dataclass(frozen=True)
class _Call:
    """What a rank is asked to do. ``search_path`` is the parent's: unpickling the arguments may need it."""

    world_size: int
    store: str
    timeout_seconds: float
    search_path: tuple[str, ...]
    name: str
    arguments: bytes


@dataclass(frozen=True)
class _Raised:
    """An exception on its way to the parent: ``pickled`` is None where it does not survive the journey."""

    pickled: bytes | None
    summary: str
    trace: str


class _Rank:
    """One living rank process, seen from the parent."""

    def __init__(self, index: int, lifeline: int, log: Path) -> None:
        self.index = index
        self.log = log
        self.connection, theirs = Pipe()
        descriptors = (theirs.fileno(), lifeline)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness", *map(str, descriptors)],
                pass_fds=descriptors,
                env=_environment({"RANK": str(index), "LOCAL_RANK": str(index)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()

    def log_tail(self, num_lines: int = 30) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-num_lines:]
        return "\n".join(["", "its last output:", *lines]) if lines else ""

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # a rank that has died is found where its answer is read
            self.connection.send_bytes(message)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class Ranks:
    """The set of rank processes. It grows when a larger world is asked for; a rank that is lost is replaced."""

    def __init__(self) -> None:
        self._living: dict[int, _Rank] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._lifeline, self._lifeline_of_parent = os.pipe()
        self._num_runs = 0
        atexit.register(self.shutdown)

    def __call__(self, world_size: int) -> RankPool:
        return RankPool(self, world_size)

    def start(self, world_size: int) -> list[_Rank]:
        """The first ``world_size`` ranks, alive and with torch imported. Raises RankFailed when one does not start."""
        new = []
        for index in range(world_size):
            if index in self._living and self._living[index].process.poll() is not None:
                self._living.pop(index).kill()
            if index not in self._living:
                self._living[index] = _Rank(index, self._lifeline, Path(self._folder.name) / f"rank{index}.log")
                new.append(self._living[index])
        for rank in new:
            try:
                ready = rank.connection.poll(START_SECONDS) and rank.connection.recv_bytes() == b"ready"
            except (EOFError, OSError):
                ready = False
            if not ready:
                message = f"rank {rank.index} did not start{rank.log_tail()}"
                self.kill(world_size)
                raise RankFailed(message)
        return [self._living[index] for index in range(world_size)]

    def new_store(self) -> Path:
        """A path where the ranks of one run meet. The file stays: a group that outlives its run still writes to it."""
        self._num_runs += 1
        return Path(self._folder.name) / f"store{self._num_runs}"

    def kill(self, world_size: int) -> None:
        """End the first ``world_size`` ranks; the next run starts new ones."""
        for index in range(world_size):
            if index in self._living:
                self._living.pop(index).kill()

    def shutdown(self) -> None:
        """End every rank and remove what they left. Called at exit where nobody calls it before."""
        atexit.unregister(self.shutdown)
        self.kill(max(self._living, default=-1) + 1)
        os.close(self._lifeline)
        os.close(self._lifeline_of_parent)
        self._folder.cleanup()


@dataclass(frozen=True)
class RankPool:
    """A world of ``world_size`` ranks, numbered from 0."""

    ranks: Ranks
    world_size: int

    def run(self, function: Callable[..., Any], /, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank at once; its results in rank order.

        Raises what the first failing rank raised, with the rank and its traceback as a note; RankFailed when a rank
        dies or is not done after ``timeout`` seconds (its stack is in the message), or when the exception cannot be
        pickled; TypeError when ``function`` cannot be found by name.
        """
        name, arguments = _name_of(function), pickle.dumps((args, kwargs))
        ranks = self.ranks.start(self.world_size)
        store = self.ranks.new_store()
        call = pickle.dumps(_Call(self.world_size, str(store), timeout, tuple(sys.path), name, arguments))
        for rank in ranks:
            rank.send(call)
        try:
            replies, dead = self._collect(ranks, timeout)
        except BaseException:  # an impatient user: the ranks are in the middle of something
            self.ranks.kill(self.world_size)
            raise
        silent = [rank for rank in ranks if rank.index not in replies]
        lost = self._end_world(silent, dead, timeout) if silent else ""
        if dead:
            raise RankFailed(lost)
        for index, reply in replies.items():
            # Where one rank raised and its peers never came back, the exception is the cause, their silence the effect.
            if isinstance(reply, _Raised):
                _reraise(index, reply)
        if lost:
            raise RankFailed(lost)
        return [replies[index] for index in range(self.world_size)]

    @property
    def pids(self) -> list[int]:
        """The process ids, in rank order; they stay the same while nothing fails."""
        return [rank.process.pid for rank in self.ranks.start(self.world_size)]

    def _collect(self, ranks: list[_Rank], timeout: float) -> tuple[dict[int, Any], list[_Rank]]:
        """What came back, by rank in the order of arrival, and the ranks that died.

        A rank keeps its process group until it is released: one that raised at once, so that peers which wait for it
        fail too, the others when all are done.
        """
        replies: dict[int, Any] = {}
        dead: list[_Rank] = []
        waiting: dict[Any, _Rank] = {rank.connection: rank for rank in ranks}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    replies[rank.index] = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, OSError):
                    dead.append(rank)
                if rank in dead or isinstance(replies[rank.index], _Raised):
                    rank.send(RELEASE)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in ranks:
            if not waiting and not isinstance(replies.get(rank.index), _Raised):
                rank.send(RELEASE)
        return replies, dead

    def _end_world(self, silent: list[_Rank], dead: list[_Rank], timeout: float) -> str:
        """Kill a world that lost ranks and say what became of them; the next run starts a new one."""
        missing = dead or silent  # where some are dead, the silence of the others is the effect
        if not dead:
            for rank in missing:
                rank.process.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks to the log
            time.sleep(STACK_SECONDS)
        fates = []
        for rank in missing:
            fate = f"gave no answer within {timeout:g} s"
            if dead:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(GRACE_SECONDS)
                fate = f"died with exit code {rank.process.poll()}"
            fates.append(f"rank {rank.index} {fate}{rank.log_tail()}")
        self.ranks.kill(self.world_size)
        return "\n".join(fates)


def _reraise(index: int, raised: _Raised) -> None:
    note = f"raised on rank {index}:\n{raised.trace}"
    if raised.pickled is None:
        raise RankFailed(f"rank {index} raised {raised.summary}\n{note}")
    exception = pickle.loads(raised.pickled)
    exception.add_note(note)
    raise exception


def _name_of(function: Callable[..., Any]) -> str:
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module in (None, "__main__") or "<" in qualname:
        raise TypeError(f"{function!r} cannot be sent to a rank: it must stand at the top level of a module")
    return f"{module}:{qualname}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for ranks: one thread each, loopback only, the repository importable."""
    search_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, "PYTHONPATH": search_path}
    return {**os.environ, **ours, **extra}


def launch_script(
    nproc: int,
    argv: Sequence[str | os.PathLike[str]],
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] = REPOSITORY,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run ``argv``, a user's script or -m and a module with its arguments, under torchrun with ``nproc`` ranks.

    Returns its exit code and output. Raises subprocess.TimeoutExpired after ``timeout`` seconds; no rank is left then.
    """
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += [os.fspath(part) for part in argv]
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=_environment(env or {}), cwd=cwd, text=True, **streams)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        # torchrun puts its workers in sessions of their own and ends them when it is asked to end itself.
        process.terminate()
        try:
            process.communicate(timeout=2 * GRACE_SECONDS + 30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _die_with_parent(lifeline: int) -> None:
    """End this process group as soon as the parent's end of the pipe closes, whatever this rank is doing."""

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


@contextlib.contextmanager
def _process_group(call: _Call) -> Iterator[None]:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(call.world_size)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(call.store, call.world_size),
        rank=int(os.environ["RANK"]),
        world_size=call.world_size,
        timeout=timedelta(seconds=call.timeout_seconds),
    )
    dist.barrier()  # a rank that is done early must not hang up while others are still connecting
    yield
    if dist.is_initialized():  # the test may have ended it
        leave = getattr(sys.modules.get("engine.mesh"), "leave_process_group", dist.destroy_process_group)
        leave()  # where the engine was used, its own groups too


def _answer(call: _Call) -> bytes:
    try:
        sys.path.extend(path for path in call.search_path if path not in sys.path)
        module, _, qualname = call.name.partition(":")
        function: Any = importlib.import_module(module)
        for part in qualname.split("."):
            function = getattr(function, part)
        args, kwargs = pickle.loads(call.arguments)
        _seed_everything()
        return pickle.dumps(function(*args, **kwargs))
    except BaseException as exception:
        return pickle.dumps(_pack(exception))


def _seed_everything() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _pack(exception: BaseException) -> _Raised:
    pickled = None
    if isinstance(exception, Exception):
        with contextlib.suppress(Exception):
            candidate = pickle.dumps(exception)
            pickle.loads(candidate)  # a constructor with arguments of its own fails here, not in the parent
            pickled = candidate
    return _Raised(pickled, f"{type(exception).__name__}: {exception}", traceback.format_exc())


def _serve(connection: Connection) -> None:
    """Answer calls until the parent hangs up. A rank that cannot join its process group ends."""
    num_modules = 0
    while True:
        call: _Call = pickle.loads(connection.recv_bytes())
        with _process_group(call):
            connection.send_bytes(_answer(call))
            connection.recv_bytes()  # RELEASE
        gc.collect()  # the threads of gloo groups that only garbage holds wake up all the time
        if len(sys.modules) > num_modules:
            num_modules = len(sys.modules)
            gc.freeze()  # what imports have made stays, and looking at it again would be most of the next collection


def serve_parent() -> None:
    """A rank's whole life. Reads its two descriptors from the command line."""
    channel, lifeline = map(int, sys.argv[1:])
    _die_with_parent(lifeline)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    with Connection(channel) as connection:
        connection.send_bytes(b"ready")
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            _serve(connection)
    # Gloo's threads now and then hang in the interpreter's own teardown, and nothing is left to clean up.
    os._exit(0)


if __name__ == "__main__":
    # Under its importable name, so that what a rank sends can be read by the parent.
    importlib.import_module("tests.harness").serve_parent()
