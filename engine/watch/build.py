"""Which watchers a plan asks for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.contracts import Watcher
from engine.watch.csv import CsvMonitor
from engine.watch.metrics_file import MetricsFile
from engine.watch.progress import Progress
from engine.watch.tensorboard import TensorBoardMonitor
from engine.watch.timers import Timers
from engine.watch.wandb import WandbMonitor
from engine.watch.watcher_list import WatcherList

if TYPE_CHECKING:
    from engine.plan import Plan

STEPS_BETWEEN_BREAKDOWNS = 10
"""How often `wall_clock_breakdown` prints when `steps_per_print` is not set."""


def build_watchers(plan: Plan, output: Path | None, rank: int, world_size: int) -> WatcherList:
    """The watchers of this rank; empty on every rank but 0, so that nothing is written twice.

    `output`: the run's directory, or None for a library user who named none: then only what the JSON switches on is
    built, and relative paths lie under the working directory.
    """
    if rank != 0:
        return WatcherList()
    config: Any = plan.config
    base = output if output is not None else Path.cwd()
    steps_per_print = _whole_steps(config.steps_per_print)
    monitors = build_monitors(config, base)
    # The monitors stay a list of their own: timers write to them too, and a monitor that fails must be gone for both.
    watchers: list[Watcher] = [monitors]
    if config.wall_clock_breakdown:
        watchers.append(Timers(monitors, steps_per_print or STEPS_BETWEEN_BREAKDOWNS))
    if output is not None:
        watchers.append(MetricsFile(output / "metrics.jsonl"))
    if output is not None or steps_per_print is not None:
        watchers.append(Progress(_total_steps(config), steps_per_print))
    return WatcherList(watchers)


def build_monitors(config: Any, base: Path) -> WatcherList:
    """The monitors that the JSON switches on. A relative `output_path` lies under `base`."""
    monitors = WatcherList()
    tensorboard, wandb, csv_monitor = config.tensorboard, config.wandb, config.csv_monitor
    if tensorboard is not None and tensorboard.enabled:
        monitors.append(TensorBoardMonitor(base / (tensorboard.output_path or "") / tensorboard.job_name))
    if wandb is not None and wandb.enabled:
        monitors.append(WandbMonitor(base, wandb.project, wandb.group, wandb.team))
    if csv_monitor is not None and csv_monitor.enabled:
        monitors.append(CsvMonitor(base / (csv_monitor.output_path or "") / csv_monitor.job_name))
    return monitors


def _total_steps(config: Any) -> int | None:
    return config.training.steps if config.training is not None else None


def _whole_steps(steps: float | None) -> int | None:
    """`steps_per_print` may be infinite, which means never."""
    return int(steps) if steps is not None and math.isfinite(steps) and steps >= 1 else None
