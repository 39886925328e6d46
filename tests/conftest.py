"""What every test shares: the ranks, one thread per process so that sums are the same everywhere, and a result file."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.harness import Ranks
from tests.result_file import ResultFile


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(world_size).run(function, *args)``; see tests/harness.py."""
    processes = Ranks()
    yield processes
    processes.shutdown()


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """``figure(line)``: a line of measured figures, printed at the end of the session, whichever worker took it."""
    return lambda line: record_property("figure", line)


def pytest_collection_finish() -> None:
    """Thousands of tests stay for the session: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [
        item for report in reports if getattr(report, "when", "") == "call" for item in report.user_properties
    ]
    for name, line in properties:
        if name == "figure":
            terminalreporter.write_line(str(line))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--result-file", type=Path, metavar="FILE", help="also write every outcome into FILE (`make matrix`)"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--result-file")
    if path and not hasattr(config, "workerinput"):  # of pytest-xdist, whose reports the one that started it gets
        config.pluginmanager.register(ResultFile(path))
