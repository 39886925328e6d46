"""`wall_clock_breakdown`: how long each phase of a step took."""

from __future__ import annotations

import sys
from typing import TextIO

from engine.contracts import StepReport, Watcher


class Timers(Watcher):
    """Hands `Train/Samples/elapsed_time_ms_PHASE` to the monitors and prints the means of every `interval_steps`.

    The phases are the keys of `report.seconds`: forward, backward, step and whatever else the engine measured.
    """

    def __init__(self, monitors: Watcher, interval_steps: int, stream: TextIO | None = None) -> None:
        self._monitors = monitors
        self._interval_steps = interval_steps
        self._stream = stream if stream is not None else sys.stderr
        self._sums: dict[str, float] = {}
        self._num_steps = 0

    def on_step(self, report: StepReport) -> None:
        phases_ms = {phase: seconds * 1000 for phase, seconds in report.seconds.items()}
        self._monitors.write_events(
            [(f"Train/Samples/elapsed_time_ms_{phase}", value, report.samples) for phase, value in phases_ms.items()]
        )
        for phase, value in phases_ms.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + value
        self._num_steps += 1
        if self._sums and report.step % self._interval_steps == 0:
            means = " | ".join(f"{phase} {total / self._num_steps:.2f}" for phase, total in self._sums.items())
            print(f"step {report.step}: time (ms) | {means}", file=self._stream, flush=True)
            self._sums, self._num_steps = {}, 0
