"""The examples, run from a folder of their own; and torchrun, which joins ranks that exist."""

from __future__ import annotations

import difflib
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.jobs.conftest import Arguments
from tests.jobs.job import ROOT, Finished, column, run, start

EXAMPLES = ROOT / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
EPOCH = re.compile(r"^epoch (\d): loss ([\d.]+), accuracy on held-out digits ([\d.]+)$", re.MULTILINE)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """The plain loop in an empty folder, with the package on the path as if it were installed."""
    return Path(shutil.copytree(EXAMPLES / "plain_loop", tmp_path / "plain_loop"))


def epochs(finished: Finished) -> list[tuple[int, float, float]]:
    assert finished.code == 0, finished.err
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in EPOCH.findall(finished.out)]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((sys.executable,), id="alone"),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_the_plain_loop_learns_the_same_before_and_after(command: tuple[str, ...], clean: Path) -> None:
    before, after = (
        epochs(run([name], cwd=clean, command=command, PYTHONPATH=str(ROOT))) for name in ("before.py", "after.py")
    )
    assert [epoch for epoch, _, _ in before] == list(range(8))
    assert after == [pytest.approx(line, abs=2e-4) for line in before]
    assert before[-1][2] > 0.85
    assert {path.name for path in clean.iterdir()} - {"__pycache__"} == {
        "README.md",
        "after.py",
        "before.py",
        "config.json",
    }


def test_the_plain_loop_changes_in_four_lines() -> None:
    before, after = ((EXAMPLES / "plain_loop" / name).read_text().splitlines() for name in ("before.py", "after.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert len([line for line in changes if line[0] == "+"]) == 4
    readme = (EXAMPLES / "plain_loop" / "README.md").read_text()
    for line in changes:
        assert f"{line[0]} {line[2:].strip()}" in readme


@pytest.mark.slow
def test_torchruns_ranks_are_joined(small: Arguments, whole_run: tuple[Path, Finished], tmp_path: Path) -> None:
    expected, _ = whole_run
    output = tmp_path / "output"
    finished = run([str(ROOT / "bin" / "ptrain"), *small(output)], command=TORCHRUN)
    assert finished.code == 0, finished.err
    assert "2 ranks (torchrun variables)" in finished.out
    assert finished.out.count("a sample of 40 characters") == 1
    assert column(output, "loss") == pytest.approx(column(expected, "loss"), abs=1e-5)


@pytest.mark.slow
def test_the_pipeline_example_runs_on_four_ranks(tmp_path: Path) -> None:
    config, output = EXAMPLES / "pipeline_gpt" / "config.json", tmp_path / "output"
    arguments = ["--config", str(config), "--nproc", "4", "--output", str(output), "--set", "training.steps=2"]
    finished = run([str(ROOT / "bin" / "ptrain"), *arguments], command=(sys.executable,))
    assert finished.code == 0, finished.err
    assert "mesh       pp 2 x dp_shard 2" in finished.out
    assert len(column(output, "loss")) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_llama_split_three_ways_is_the_llama(tmp_path: Path) -> None:
    config = EXAMPLES / "hf_llama_3d" / "config.json"
    losses = {}
    for num_ranks, changes in {8: (), 1: ("--set", "pipeline.stages=1", "--set", "tensor_parallel.size=1")}.items():
        output = tmp_path / str(num_ranks)
        arguments = ["--config", str(config), "--nproc", str(num_ranks), "--output", str(output), *changes]
        arguments += ["--set", "training.steps=3"]
        finished = start([str(ROOT / "bin" / "ptrain"), *arguments], command=(sys.executable,)).finish(timeout=400)
        assert finished.code == 0, finished.err
        assert ("mesh       pp 2 x dp_shard 2 x tp 2" in finished.out) == (num_ranks == 8)
        losses[num_ranks] = column(output, "loss")
    assert len(losses[8]) == 3
    assert losses[8] == pytest.approx(losses[1], abs=1e-4)
