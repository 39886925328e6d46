"""The progress bar, and the lines that take its place where no terminal is."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from engine.contracts import StepReport, Watcher
from engine.watch.scalars import StepClock

if TYPE_CHECKING:
    from engine.plan import Plan

SECONDS_BETWEEN_LINES = 10.0
DEFAULT_SIZE = {"ncols": 100, "nrows": 24}


class Progress(Watcher):
    """A tqdm bar with loss, lr and tokens/s on a terminal; without one, a line about every 10 seconds.

    With `steps_per_print` a line is printed at every multiple of it, in both cases. `total_steps` None means that
    the end is not known.
    """

    def __init__(self, total_steps: int | None, steps_per_print: int | None, stream: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._steps_per_print = steps_per_print
        self._stream = stream if stream is not None else sys.stderr
        self._on_terminal = self._stream.isatty()
        self._bar: Any = None
        self._clock = StepClock()
        self._line_time = time.monotonic()
        self._mean_seconds: float | None = None

    def on_start(self, plan: Plan) -> None:
        self._clock.resume()

    def on_step(self, report: StepReport) -> None:
        seconds, tokens_per_second = self._clock.measure(report)
        # An exponential mean over about ten steps, as the bar itself uses.
        self._mean_seconds = seconds if self._mean_seconds is None else 0.9 * self._mean_seconds + 0.1 * seconds
        if self._on_terminal:
            self._update_bar(report, tokens_per_second)
        if self._is_due(report.step):
            self._line_time = time.monotonic()
            self._write(self._line(report, tokens_per_second))

    def on_evaluation(self, report: StepReport | None, metrics: Mapping[str, float]) -> None:
        step = report.step if report is not None else 0
        values = " | ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
        self._write(f"step {step}: {values}")
        self._clock.resume()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _is_due(self, step: int) -> bool:
        if self._steps_per_print is not None:
            return step % self._steps_per_print == 0
        return not self._on_terminal and (
            step == self._total_steps or time.monotonic() - self._line_time >= SECONDS_BETWEEN_LINES
        )

    def _line(self, report: StepReport, tokens_per_second: float) -> str:
        of_total = f"/{self._total_steps}" if self._total_steps else ""
        parts = [f"step {report.step}{of_total}: loss {_number(report.loss, '.4f')}", f"lr {report.lr:.3g}"]
        if report.grad_norm is not None:
            parts.append(f"grad norm {report.grad_norm:.3g}")
        if report.loss_scale != 1.0:
            parts.append(f"loss scale {report.loss_scale:g}")
        parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if report.skipped_steps:
            parts.append(f"skipped {report.skipped_steps}")
        if self._total_steps and self._mean_seconds is not None:
            parts.append(f"ETA {duration(self._mean_seconds * max(self._total_steps - report.step, 0))}")
        if not report.applied:
            where = (
                f" in {report.first_nonfinite[1]} on rank {report.first_nonfinite[0]}" if report.first_nonfinite else ""
            )
            parts.append(f"this step was skipped: a gradient{where} is not finite")
        return " | ".join(parts)

    def _update_bar(self, report: StepReport, tokens_per_second: float) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total_steps,
                initial=report.step - 1,
                unit="step",
                file=self._stream,
                **self._size(),
                mininterval=0.1,
            )
        values = {
            "loss": _number(report.loss, ".4f"),
            "lr": f"{report.lr:.2e}",
            "tokens/s": f"{tokens_per_second:,.0f}",
        }
        self._bar.set_postfix(values, refresh=False)
        self._bar.update(report.step - self._bar.n)

    def _size(self) -> dict[str, Any]:
        """Pseudo-terminals without a size exist (`docker -t`, recorders); tqdm would show nothing on them."""
        try:
            sized = os.get_terminal_size(self._stream.fileno()).columns > 0
        except OSError:
            sized = False
        return {"dynamic_ncols": True} if sized else DEFAULT_SIZE

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def duration(seconds: float) -> str:
    """`1:02:03` or `02:03`, as tqdm writes it."""
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes:02d}:{second:02d}"
