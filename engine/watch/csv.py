"""`csv_monitor`: one CSV file per scalar under `output_path/job_name`."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from engine.watch.scalars import Event, ScalarMonitor


class CsvMonitor(ScalarMonitor):
    """`Train/Samples/lr` goes to `Train_Samples_lr.csv` with the header `step,lr`; `step` holds global samples.

    A file that exists is appended to and its header stays (DeepSpeed writes the header again on every restart).
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._files: dict[str, tuple[IO[str], Any]] = {}

    def write_events(self, events: Sequence[Event]) -> None:
        written = set()
        for name, value, samples in events:
            file, writer = self._file(name)
            writer.writerow((samples, value))
            written.add(file)
        for file in written:
            file.flush()

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> tuple[IO[str], Any]:
        if name not in self._files:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{name.replace('/', '_')}.csv"
            file = path.open("a", newline="", encoding="utf-8")
            writer = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                writer.writerow(("step", name.rsplit("/", 1)[-1]))
            self._files[name] = (file, writer)
        return self._files[name]
