"""`tensorboard`: scalars as TensorBoard events under `output_path/job_name`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.contracts import StepReport
from engine.watch.scalars import Event, ScalarMonitor


class TensorBoardMonitor(ScalarMonitor):
    """The event file is opened with the first scalar.

    Opened by a training step, it tells TensorBoard to drop what an earlier run had logged from this sample count on
    (`purge_step`), so that a resumed run shows one curve.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._writer: Any = None

    def on_step(self, report: StepReport) -> None:
        self._open(purge_step=report.samples)
        super().on_step(report)

    def write_events(self, events: Sequence[Event]) -> None:
        writer = self._open(purge_step=None)
        for name, value, samples in events:
            writer.add_scalar(name, value, samples)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int | None) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=purge_step)
        return self._writer
