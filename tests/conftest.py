"""What every test shares: the ranks, one thread per process so that sums are the same everywhere, and a result file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bench.process import machine_facts
from tests.harness import Ranks


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
    if path := config.getoption("--result-file"):
        config.pluginmanager.register(ResultFile(path))


class ResultFile:
    """Writes a Markdown table of every test's outcome, with the commit and the machine that it was measured on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[str, str, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.rows.append((report.nodeid, report.outcome, report.duration))

    def pytest_sessionfinish(self) -> None:
        if not self.rows:
            return
        facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
        num_passed = sum(outcome == "passed" for _, outcome, _ in self.rows)
        lines = ["# Parity", "", f"Written by `make matrix`. {num_passed} of {len(self.rows)} passed. {facts}.", ""]
        lines += ["| test | outcome | seconds |", "| --- | --- | --- |"]
        lines += [f"| `{name.replace('|', '/')}` | {outcome} | {seconds:.1f} |" for name, outcome, seconds in self.rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join(lines) + "\n")
