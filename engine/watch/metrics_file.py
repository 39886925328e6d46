"""`metrics.jsonl`: one JSON object per optimizer step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engine.contracts import StepReport, Watcher
from engine.watch.scalars import StepClock, finite_or_none

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.plan import Plan


class MetricsFile(Watcher):
    """Keys: step, loss, lr, grad_norm, loss_scale, tokens_per_second, samples, tokens, tokens_computed, layers_skipped,
    skipped_steps, skipped, seconds, comm_bytes; difficulty_NAME for each metric of a curriculum.

    `skipped` is true when this step's gradient was not finite and nothing was updated. From `samples` to
    `skipped_steps` they are totals of the run, `seconds` is the duration of this step and `comm_bytes` what rank 0 sent
    in it. A value that is not finite is written as null. Each line is flushed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._clock = StepClock()

    def on_start(self, plan: Plan) -> None:
        self._clock.resume()

    def on_step(self, report: StepReport) -> None:
        seconds, tokens_per_second = self._clock.measure(report)
        line = {
            "step": report.step,
            "loss": finite_or_none(report.loss),
            "lr": report.lr,
            "grad_norm": finite_or_none(report.grad_norm),
            "loss_scale": report.loss_scale,
            "tokens_per_second": tokens_per_second,
            "samples": report.samples,
            "tokens": report.tokens_seen,
            "tokens_computed": report.tokens_computed,
            "layers_skipped": report.layers_skipped,
            "skipped_steps": report.skipped_steps,
            "skipped": not report.applied,
            "seconds": seconds,
            "comm_bytes": report.comm_bytes,
            **{f"difficulty_{name}": finite_or_none(value) for name, value in report.difficulties.items()},
        }
        if self._file is None:
            self._file = self._open(report.step)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def on_evaluation(self, report: StepReport | None, metrics: Mapping[str, float]) -> None:
        self._clock.resume()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, first_step: int) -> IO[str]:
        """Steps from `first_step` on were taken by a run that this one replaces: they are cut off."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        keep_bytes = length_before_step(self._path, first_step)
        file = self._path.open("r+", encoding="utf-8", newline="\n")
        file.truncate(keep_bytes)
        file.seek(keep_bytes)
        return file


def length_before_step(path: Path, step: int) -> int:
    """Bytes of the leading lines of a metrics file that are whole and belong to steps before `step`."""
    length_bytes = 0
    with path.open("rb") as file:
        for line in file:
            try:
                earlier = line.endswith(b"\n") and json.loads(line)["step"] < step
            except (ValueError, KeyError, TypeError):
                earlier = False
            if not earlier:
                break
            length_bytes += len(line)
    return length_bytes


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file; None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        lines = [line for line in file if line.endswith(b"\n")]
    try:
        last: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        return None
    return last
