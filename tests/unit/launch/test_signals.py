"""The stop request inside one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from engine.launch.signals import LAUNCHER_PID, StopRequest

ROOT = Path(__file__).resolve().parents[3]


def test_first_signal_is_noted_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_code) == (None, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, stop.exit_code) == (signal.SIGTERM, 143)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_whoever_asks_is_told_whether_the_signal_came_before_or_after() -> None:
    told: list[int] = []
    with StopRequest() as stop:
        stop.tell(told.append)
        assert told == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]
        stop.tell(told.append)
        assert told == [signal.SIGTERM] * 2


def test_second_signal_exits_at_once() -> None:
    script = """
import os, signal
from engine.launch.signals import StopRequest
with StopRequest():
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("never", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (130, "still here\n")


def test_a_rank_whose_launcher_is_dead_already_ends_too() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    script = """
import time
from engine.launch.signals import end_with_launcher
end_with_launcher()
time.sleep(20)
"""
    environment = os.environ | {LAUNCHER_PID: str(launcher.pid)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=15)
    assert done.returncode == -signal.SIGTERM


def test_a_process_beside_the_ranks_is_left_alone() -> None:
    script = (
        "from engine.launch.signals import end_with_launcher; end_with_launcher(0.01); import time; time.sleep(0.5)"
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        environment = os.environ | {LAUNCHER_PID: str(launcher.pid)}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, timeout=20
        )
        launcher.communicate(b"\n")
    assert done.returncode == 0
