"""Every ZeRO stage on two ranks gives the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.conftest import Arguments
from tests.jobs.job import EXAMPLE, Finished, column, run, summary

TOLERANCE = 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_one_process(
    stage: int, small: Arguments, whole_run: tuple[Path, Finished], tmp_path: Path
) -> None:
    expected, _ = whole_run
    output = tmp_path / "output"
    finished = run(small(output, {"zero_optimization.stage": stage}, "--nproc", "2"))
    assert finished.code == 0, finished.err
    assert f"stage {stage}" in finished.out
    assert column(output, "loss") == pytest.approx(column(expected, "loss"), abs=TOLERANCE)
    assert column(output, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-4)
    for key in ("step", "lr", "samples", "tokens", "skipped"):
        assert column(output, key) == column(expected, key)
    assert summary(output)["validation_loss"] == pytest.approx(summary(expected)["validation_loss"], abs=TOLERANCE)
    assert summary(output)["world_size"] == 2
    assert len(summary(output)["peak_memory_bytes_per_rank"]) == 2


@pytest.fixture(scope="module")
def full_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The default run on two ranks at every stage, with less evaluation before its end."""
    folder = tmp_path_factory.mktemp("full")
    outputs = {stage: folder / f"stage{stage}" for stage in range(4)}
    for stage, output in outputs.items():
        arguments = ["--config", str(EXAMPLE), "--nproc", "2", "--output", str(output)]
        finished = run(
            [*arguments, "--set", f"zero_optimization.stage={stage}", "--set", "training.eval_interval=null"]
        )
        assert finished.code == 0, finished.err
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_default_run_ends_alike(stage: int, full_runs: dict[int, Path]) -> None:
    first, other = full_runs[0], full_runs[stage]
    assert column(other, "loss")[:10] == pytest.approx(column(first, "loss")[:10], abs=TOLERANCE)
    assert summary(other)["validation_loss"] == pytest.approx(summary(first)["validation_loss"], abs=5e-3)
    assert summary(other)["validation_loss"] < summary(other)["bigram_entropy"]
