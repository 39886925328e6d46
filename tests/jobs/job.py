"""Runs `bin/ptrain` as a user does: a process of its own, with an output folder to look into afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PTRAIN = (sys.executable, str(ROOT / "bin" / "ptrain"))
EXAMPLE = ROOT / "examples" / "gpt_text" / "config.json"
MODELS = Path(__file__).with_name("models.py")

SMALL: dict[str, Any] = {
    "model.args.num_blocks": 2,
    "model.args.width": 32,
    "model.args.sequence_length": 32,
    "data.sequence_length": 32,
    "train_batch_size": 12,
    "training.steps": 12,
    "training.eval_interval": 6,
    "training.eval_batches": 2,
    "training.save_interval": 5,
    "training.sample_length": 40,
    "scheduler.params.total_num_steps": 12,
    "scheduler.params.warmup_num_steps": 4,
}
"""Makes the example a run of a second."""

LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    seconds: float


def settings(values: Mapping[str, Any]) -> list[str]:
    """`--set` arguments."""
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return [word for key, value in shown.items() for word in ("--set", f"{key}={value}")]


def environment(**changes: str) -> dict[str, str]:
    """One thread a rank, and no launcher around this test."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | changes


def start(arguments: Sequence[str], *, cwd: Path = ROOT, command: Sequence[str] = PTRAIN, **env: str) -> Running:
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    return Running(process, time.monotonic())


def run(arguments: Sequence[str], *, cwd: Path = ROOT, command: Sequence[str] = PTRAIN, **env: str) -> Finished:
    return start(arguments, cwd=cwd, command=command, **env).finish()


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    started: float

    def finish(self, timeout: float = 120) -> Finished:
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # a launcher's ranks end with it
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout} s\n{out}\n{err}") from None
        return Finished(self.process.returncode, out, err, time.monotonic() - self.started)


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def column(output: Path, key: str) -> list[Any]:
    return [line[key] for line in metrics(output)]


def summary(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return found


def wait_for(*paths: Path, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"{[str(path) for path in paths if not path.exists()]} did not appear"
        time.sleep(0.02)
