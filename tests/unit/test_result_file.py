"""The page of the parity table: rows by their largest deviation, and outcomes that outlive a session."""

from __future__ import annotations

from pathlib import Path

from tests.bench.process import REPOSITORY
from tests.result_file import DEVIATION, ROW, Deviation, ResultFile, read_outcomes


class Report:
    """As much of pytest's as is read."""

    def __init__(self, nodeid: str, outcome: str, *properties: tuple[str, object]) -> None:
        self.nodeid, self.outcome, self.when, self.duration = nodeid, outcome, "call", 1.5
        self.user_properties = list(properties)


def deviation(**values: float) -> tuple[str, object]:
    return DEVIATION, Deviation(**values).to_json()


def note(page: ResultFile, *reports: Report) -> None:
    for report in reports:
        page.pytest_runtest_logreport(report)  # type: ignore[arg-type]


def test_a_row_has_the_largest_deviation_of_its_tests(tmp_path: Path) -> None:
    page, row = ResultFile(tmp_path / "matrix.md"), (ROW, "tp2, stage 0, fp32")
    note(page, Report("a[x]", "passed", row, deviation(losses=1e-6, norms=3e-7)))
    note(page, Report("b", "failed", row, deviation(losses=2e-6), deviation(losses=1e-7, parameters=4e-5)))
    note(page, Report("c", "passed"))
    text = page.path.read_text()
    assert "| tp2, stage 0, fp32 | 1 of 2 | 2.0e-06 | 3.0e-07 | 4.0e-05 |" in text
    assert "2 of 3 passed, in 4 s of tests." in text


def test_portions_add_up(tmp_path: Path) -> None:
    path = tmp_path / "matrix.md"
    note(ResultFile(path), Report("first", "passed", (ROW, "r"), deviation(losses=1e-6)), Report("second", "failed"))
    note(ResultFile(path), Report("second", "passed"), Report("third", "passed"))
    first, second, third = read_outcomes(path)
    assert (first.test, first.row, first.deviation) == ("first", "r", Deviation(1e-6))
    assert (second.outcome, third.outcome) == ("passed", "passed")


def test_the_page_of_the_repository_has_every_row() -> None:
    outcomes = read_outcomes(REPOSITORY / "docs" / "benchmarks" / "matrix.md")
    assert not [outcome.test for outcome in outcomes if outcome.outcome != "passed"]
    splits = ("tp2", "tp4", "dp2 x tp2", "hsdp 2 x 2 x tp2", "sp2", "cp2")
    rows = {f"{split}, stage {stage}, {dtype}" for split in splits for stage in range(4) for dtype in ("fp32", "bf16")}
    assert rows <= {outcome.row for outcome in outcomes if outcome.deviation is not None}
