"""The scalars of a step under DeepSpeed's names, and the base of the monitors that write them.

The x axis is always the number of samples that the whole run has seen.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine.contracts import StepReport, Watcher

if TYPE_CHECKING:
    from engine.plan import Plan

Event = tuple[str, float, int]
"""Name, value, global samples."""


class StepClock:
    """Seconds and tokens of each step, as seen by a watcher.

    A step's time is `report.seconds["total"]` where the engine measured it, else the wall-clock time since the
    previous step; evaluations (`resume`) do not count.
    """

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._tokens: int | None = None

    def resume(self) -> None:
        self._mark = time.perf_counter()

    def measure(self, report: StepReport) -> tuple[float, float]:
        """Returns (seconds, tokens per second) of the step. Call it once a step."""
        now = time.perf_counter()
        seconds = report.seconds.get("total", now - self._mark)
        # The first report of a resumed run carries the totals of the steps before it.
        before = self._tokens if self._tokens is not None else report.tokens_seen * (report.step - 1) // report.step
        self._mark, self._tokens = now, report.tokens_seen
        return seconds, max(report.tokens_seen - before, 0) / seconds if seconds > 0 else 0.0


def step_scalars(report: StepReport, tokens_per_second: float, fp16: bool) -> list[Event]:
    """What the monitors get of one step. `loss_scale` exists only under fp16, as in DeepSpeed."""
    scalars: list[tuple[str, float | None]] = [
        ("Train/Samples/lr", report.lr),
        ("Train/Samples/train_loss", report.loss),
        ("Train/grad_norm", report.grad_norm),
        ("Train/tokens_per_second", tokens_per_second),
        ("Comm/bytes_per_step", report.comm_bytes),
        ("Train/tokens", report.tokens_seen),
        *((f"Train/difficulty/{name}", value) for name, value in report.difficulties.items()),
    ]
    if report.tokens_computed != report.tokens_seen:
        scalars += [("Train/tokens_computed", report.tokens_computed), ("Train/layers_skipped", report.layers_skipped)]
    if fp16:
        scalars.append(("Train/Samples/loss_scale", report.loss_scale))
    scalars += report.scalars.items()
    return [(name, value, report.samples) for name, value in scalars if value is not None]


def evaluation_scalars(report: StepReport | None, metrics: Mapping[str, float]) -> list[Event]:
    """`eval_loss` becomes `Train/Samples/eval_loss`; a name that has a slash is kept as it is."""
    samples = report.samples if report is not None else 0
    return [(name if "/" in name else f"Train/Samples/{name}", value, samples) for name, value in metrics.items()]


def finite_or_none(value: float | None) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


class ScalarMonitor(Watcher, ABC):
    """A monitor that turns reports into scalars; a subclass writes them in `write_events`."""

    def __init__(self) -> None:
        self._clock = StepClock()
        self._fp16 = False

    def on_start(self, plan: Plan) -> None:
        self._fp16 = plan.precision.compute == "fp16"
        self._clock.resume()

    def on_step(self, report: StepReport) -> None:
        _, tokens_per_second = self._clock.measure(report)
        self.write_events(step_scalars(report, tokens_per_second, self._fp16))

    def on_evaluation(self, report: StepReport | None, metrics: Mapping[str, float]) -> None:
        self.write_events(evaluation_scalars(report, metrics))
        self._clock.resume()

    @abstractmethod
    def write_events(self, events: Sequence[Event]) -> None: ...
