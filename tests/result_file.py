"""The page that `make matrix` writes: how far each row of the parity table is off, and every test's outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.bench.process import machine_facts

ROW, DEVIATION = "row", "deviation"
"""Names of the properties that a test gives its report."""

COLUMNS = ("test", "outcome", "seconds", "losses", "norms", "parameters", "row", "commit")
INTRODUCTION = """\
Written by `make matrix`. Each test compares ranks of the engine with one process of plain PyTorch. The columns have
the largest difference over all steps: of losses, absolute; of gradient norms, relative; of elements of parameters,
absolute. Where faults are planted, these are the differences that they make.
"""


@dataclass(frozen=True)
class Deviation:
    """The largest over the steps of a run: of losses and elements of parameters absolute, of norms relative."""

    losses: float = 0.0
    norms: float = 0.0
    parameters: float = 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def largest(cls, several: Iterable[Deviation]) -> Deviation | None:
        found = list(several)
        if not found:
            return None
        return cls(*(max(getattr(one, name) for one in found) for name in ("losses", "norms", "parameters")))


@dataclass(frozen=True)
class Outcome:
    """Of one test. ``row``: of the parity table, or nothing."""

    test: str
    outcome: str
    seconds: float
    deviation: Deviation | None
    row: str
    commit: str

    @property
    def cells(self) -> list[str]:
        return [f"`{self.test}`", self.outcome, f"{self.seconds:.1f}", *figures(self.deviation), self.row, self.commit]

    @classmethod
    def of_line(cls, line: str) -> Outcome:
        """What `cells` made."""
        test, outcome, seconds, losses, norms, parameters, row, commit = (c.strip() for c in line[1:-2].split("|"))
        deviation = Deviation(float(losses), float(norms), float(parameters)) if losses else None
        return cls(test.strip("`"), outcome, float(seconds), deviation, row, commit)


def figures(deviation: Deviation | None) -> list[str]:
    return [f"{value:.1e}" for value in asdict(deviation).values()] if deviation else ["", "", ""]


def read_outcomes(path: Path) -> list[Outcome]:
    """Of an earlier page; none where there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Outcome.of_line(line) for line in lines if line.startswith("| `")]


class ResultFile:
    """Outcomes of a session, written after each test. Tests that did not run keep what an earlier page says of them, so
    that a long table can be run in portions, and stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes = {outcome.test: outcome for outcome in read_outcomes(path)}
        self.facts = machine_facts()
        commit, _, changes = str(self.facts.pop("commit")).partition("+")
        self.commit = f"{commit[:10]}{'+' * bool(changes)}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        properties = report.user_properties
        found = [Deviation(**value) for name, value in properties if name == DEVIATION and isinstance(value, dict)]
        row = next((str(value) for name, value in properties if name == ROW), "")
        test = report.nodeid.replace("|", "/")
        seconds = report.duration
        self.outcomes[test] = Outcome(test, report.outcome, seconds, Deviation.largest(found), row, self.commit)

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.page(sorted(self.outcomes.values(), key=lambda outcome: outcome.test)))

    def page(self, outcomes: list[Outcome]) -> str:
        num_passed = sum(outcome.outcome == "passed" for outcome in outcomes)
        seconds = sum(outcome.seconds for outcome in outcomes)
        lines = ["# Parity", "", *INTRODUCTION.splitlines(), ""]
        lines += [f"{num_passed} of {len(outcomes)} passed, in {seconds:.0f} s of tests. "]
        lines[-1] += ", ".join(f"{name} {value}" for name, value in self.facts.items()) + "."
        lines += ["", "## Rows", "", *table(("row", "passed", "losses", "norms", "parameters"), _rows(outcomes))]
        lines += ["", "## Tests", "", *table(COLUMNS, [outcome.cells for outcome in outcomes])]
        return "\n".join(lines) + "\n"


def _rows(outcomes: list[Outcome]) -> list[list[str]]:
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.row:
            rows.setdefault(outcome.row, []).append(outcome)
    return [
        [
            row,
            f"{sum(outcome.outcome == 'passed' for outcome in tests)} of {len(tests)}",
            *figures(Deviation.largest(outcome.deviation for outcome in tests if outcome.deviation)),
        ]
        for row, tests in sorted(rows.items())
    ]


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(columns)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
