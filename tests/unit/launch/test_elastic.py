"""The launcher with tiny workers: exit codes, signals, and nothing left behind.

The launcher runs in a process of its own, because it installs signal handlers and is itself what gets the signals.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from engine.launch.elastic import launch

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = multiprocessing.get_context("forkserver")
# torch is imported once for all launchers of this file.
PROCESSES.set_forkserver_preload(["torch.distributed.elastic.multiprocessing"])
PRELUDE = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"]); here = Path(sys.argv[1])
from engine.launch.outcome import leave_message
from engine.launch.signals import StopRequest, end_with_launcher
(here / f"pid{rank}").write_text(str(os.getpid()))
def everyone(name):
    (here / f"{name}{rank}").touch()
    while not all((here / f"{name}{r}").exists() for r in range(2)): time.sleep(0.01)
"""


class Launcher:
    """A process that runs `launch` with two ranks of `worker`, a Python text."""

    def __init__(self, worker: str, directory: Path) -> None:
        self._directory = directory
        self.process = PROCESSES.Process(target=run_launcher, args=(PRELUDE + worker, directory))
        self.process.start()

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def finish(self) -> tuple[int | None, str, str]:
        self.process.join(timeout=60)
        assert self.process.exitcode is not None, "the launcher did not end"
        assert_nobody_left(self._directory)
        return self.process.exitcode, (self._directory / "out").read_text(), (self._directory / "err").read_text()


def run_launcher(worker: str, directory: Path) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.pop("OMP_NUM_THREADS", None)
    sys.exit(launch(2, [str(directory)], worker=(sys.executable, "-c", worker), failure_grace_seconds=1.0))


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def assert_nobody_left(directory: Path) -> None:
    pids = [int(path.read_text()) for path in directory.glob("pid*")]
    assert len(pids) >= 2
    end = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, "a worker is left behind"
        time.sleep(0.02)


def run(worker: str, directory: Path) -> tuple[int | None, str, str]:
    return Launcher(worker, directory).finish()


def test_environment_and_streams(tmp_path: Path) -> None:
    code, out, err = run(
        """
everyone("a")
names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
print(rank, [os.environ[name] for name in names], int(os.environ["OMP_NUM_THREADS"]) >= 1)
print("error", rank, file=sys.stderr)
""",
        tmp_path,
    )
    assert code == 0
    assert out == "0 ['2', '2', '0', '127.0.0.1'] True\n"
    assert sorted(err.splitlines()) == ["error 0", "error 1"]


def test_ranks_can_meet(tmp_path: Path) -> None:
    code, out, err = run(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor(float(rank + 1)); dist.all_reduce(value); print(value.item())
dist.destroy_process_group()
""",
        tmp_path,
    )
    assert (code, out) == (0, "3.0\n"), err


def test_same_mistake_is_told_once(tmp_path: Path) -> None:
    code, out, err = run(
        'everyone("a"); leave_message(rank, "no such file"); time.sleep(0.3 * rank); sys.exit(2)', tmp_path
    )
    assert (code, out, err) == (2, "", "ptrain: no such file\n")


def test_a_dead_rank_is_named_and_the_stuck_one_is_killed(tmp_path: Path) -> None:
    worker = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(here / f"pid_child{rank}").write_text(str(child.pid))
everyone("a")
import signal
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
    begin = time.monotonic()
    code, _, err = run(worker, tmp_path)
    assert time.monotonic() - begin < 20
    assert code == 1
    assert err.startswith("ptrain: rank 1 died (signal 9)")
    assert len(err.splitlines()) == 1


STOPPING = """
end_with_launcher(poll_seconds=0.05)
with StopRequest() as stop:
    everyone("ready")
    while stop.signal is None: time.sleep(0.01)
    time.sleep(0.2 if rank else 0.6)
    (here / f"saved{rank}").touch()
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_ranks_finish(tmp_path: Path, number: signal.Signals) -> None:
    launcher = Launcher(STOPPING, tmp_path)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    launcher.send(number)
    code, _, err = launcher.finish()
    assert code == 128 + number
    assert "Traceback" not in err
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    launcher = Launcher(STOPPING.replace("time.sleep(0.2", "(here / 'asked').touch(); time.sleep(60"), tmp_path)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    launcher.send(signal.SIGTERM)
    wait_for(tmp_path / "asked")
    launcher.send(signal.SIGINT)
    assert launcher.finish()[0] == 130
    assert not (tmp_path / "saved1").exists()


def test_ranks_of_a_killed_launcher_save_and_end(tmp_path: Path) -> None:
    launcher = Launcher(STOPPING, tmp_path)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    launcher.send(signal.SIGKILL)
    wait_for(tmp_path / "saved0", tmp_path / "saved1")
    assert launcher.finish()[0] == -signal.SIGKILL
