"""The benchmark of pipelines on slow networks: its jobs, its bars, and a small run (slow)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.bench import hosts, pipeline_network
from tests.bench.hosts import why_not_possible
from tests.bench.pipeline_network import Rows, job_of
from tests.bench.slow_network import Measured
from tests.bench.workload import WORKLOADS
from tests.harness import REPOSITORY


def rows(seconds: float, loss: float = 2.0) -> Rows:
    found = {
        "data parallel": Measured(4.0, 0.5, 1e6, 1e6, 2.0, 100),
        "pipeline": Measured(seconds, 0.5, 1e5, 1e5, 8.0, 100),
    }
    return Rows(8, WORKLOADS["tiny"], found, {"data parallel": [2.0], "pipeline": [loss]}, 95.0)


def test_both_layouts_have_the_same_samples_a_step() -> None:
    apart, staged = job_of("data parallel", 5, 4), job_of("pipeline", 5, 4)
    assert apart.config["gradient_accumulation_steps"] * 2 == staged.config["gradient_accumulation_steps"]
    assert staged.config["pipeline"] == {"stages": 2}
    assert (apart.timed, apart.num_steps) == ((1, 6), 6)


@pytest.mark.parametrize(("made", "holds"), [(rows(1.0), [True, True]), (rows(2.0), [False, True]),
                                             (rows(1.0, 2.1), [True, False])])  # fmt: skip
def test_bars(made: Rows, holds: list[bool]) -> None:
    assert [bar.holds for bar in made.bars(is_first=True)] == holds
    assert len(made.bars(is_first=False)) == 1
    assert made.lines()[1].endswith(f"| {4.0 / made.found['pipeline'].step_seconds:.2f} |")


def test_without_namespaces_the_benchmark_says_so(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(hosts, "why_not_possible", lambda: "ip not found")
    assert pipeline_network.main([]) == 0
    assert capsys.readouterr().out == "skipped: ip not found\n"


@pytest.mark.slow
def test_a_small_run(tmp_path: Any) -> None:
    """Where hosts cannot be made the benchmark says why; where they can, both layouts learn alike."""
    output = tmp_path / "page.md"
    command = [sys.executable, "-m", "tests.bench.pipeline_network", "--size", "tiny", "--samples", "4", "--steps", "2"]
    command += ["--no-bars", "--output", str(output)]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr
    if reason := why_not_possible():
        assert finished.stdout == f"skipped: {reason}\n"
        return
    page = output.read_text()
    assert "| 4 | pipeline |" in page
    (losses,) = (line for line in page.splitlines() if "relative difference of the losses" in line)
    assert losses.endswith("| yes |")
