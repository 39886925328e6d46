"""`summary.json`: what a run came to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.contracts import StepReport, Watcher
from engine.watch.scalars import StepClock, finite_or_none

if TYPE_CHECKING:
    from engine.plan import Plan


@dataclass(frozen=True)
class Counters:
    """How far the run is, steps before a resume included; what the last four mean, `StepReport` says."""

    steps: int
    skipped_steps: int
    samples: int
    tokens: int
    tokens_computed: int
    layers_skipped: int


class Summary(Watcher):
    """Measures the run and keeps its last evaluation; `build` makes the content of the file, at the end.

    `tokens_per_second` is the mean over the steps of this process (a resumed run counts from where it resumed),
    evaluations left out; `seconds` is the wall-clock time since the start, all included. `comm_bytes_per_step` is
    what this rank sent, as a mean over the same steps.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._clock = StepClock()
        self._metrics: dict[str, float] = {}
        self._step_seconds = 0.0
        self._tokens = 0.0
        self._num_steps = self._comm_bytes = 0

    def on_start(self, plan: Plan) -> None:
        self._start = time.perf_counter()
        self._clock.resume()

    def on_step(self, report: StepReport) -> None:
        seconds, tokens_per_second = self._clock.measure(report)
        self._step_seconds += seconds
        self._tokens += tokens_per_second * seconds
        self._num_steps += 1
        self._comm_bytes += report.comm_bytes

    def on_evaluation(self, report: StepReport | None, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)
        self._clock.resume()

    def build(
        self,
        *,
        counters: Counters,
        train_loss: float | None,
        bigram_entropy: float | None,
        world_size: int,
        config_hash: str,
        peak_memory_bytes_per_rank: Sequence[int],
        comm_bytes: Mapping[str, int],
    ) -> dict[str, Any]:
        """The summary as JSON values. Losses and `bigram_entropy` in nats per token; null where unknown.

        ``comm_bytes``: what this rank sent since the start, by purpose.
        """
        return {
            "train_loss": finite_or_none(train_loss),
            "validation_loss": finite_or_none(self._metrics.get("eval_loss")),
            "bigram_entropy": finite_or_none(bigram_entropy),
            **asdict(counters),
            "seconds": time.perf_counter() - self._start,
            "tokens_per_second": self._tokens / self._step_seconds if self._step_seconds else 0.0,
            "comm_bytes_per_step": self._comm_bytes / self._num_steps if self._num_steps else 0.0,
            "comm_bytes": dict(comm_bytes),
            "peak_memory_bytes_per_rank": list(peak_memory_bytes_per_rank),
            "world_size": world_size,
            "config_hash": config_hash,
        }


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is either whole or not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            json.dump(value, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
