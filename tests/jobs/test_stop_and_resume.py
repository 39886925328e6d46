"""A run that a signal stops, and one that goes on where it stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import Arguments
from tests.jobs.job import Finished, Running, column, metrics, run, start, summary, wait_for

AT_STEP = 8
"""Between two checkpoints and between two evaluations."""

KEYS_OF_TIME = {"tokens_per_second", "seconds"}


def stop(faulty: Arguments, output: Path, nproc: int, *signals: signal.Signals, go: bool = True) -> Finished:
    """Run on `nproc` ranks and send the signals while every rank is in the middle of step `AT_STEP`."""
    output.parent.mkdir(exist_ok=True)
    changes = {"model.args.at_forward": AT_STEP}
    running = start(faulty(output, "wait", changes, "--nproc", str(nproc)))
    wait_for(*(output.parent / f"waiting{rank}" for rank in range(nproc)))
    for number in signals:
        running.process.send_signal(number)
        time.sleep(0.5)
    if go:
        (output.parent / "go").touch()
    return running.finish()


def without_time(output: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if key not in KEYS_OF_TIME} for line in metrics(output)]


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stopped_and_resumed_is_as_never_stopped(
    nproc: int,
    small: Arguments,
    faulty: Arguments,
    whole_run: tuple[Path, Finished],
    whole_run_of_two: tuple[Path, Finished],
    tmp_path: Path,
) -> None:
    expected, _ = whole_run if nproc == 1 else whole_run_of_two
    output = tmp_path / "output"
    stopped = stop(faulty, output, nproc, signal.SIGTERM)
    assert stopped.code == 143, stopped.err
    told = f"stopped by SIGTERM after step {AT_STEP}; saved {output}/checkpoints/global_step{AT_STEP}"
    assert f"{told}; resume with --resume auto" in stopped.out
    assert "SIGTERM: finishing the step and saving; once more to stop at once" in stopped.err
    assert len(metrics(output)) == AT_STEP
    assert not (output / "summary.json").exists()

    resumed = run(small(output, {}, "--nproc", str(nproc), "--resume", "auto"))
    assert resumed.code == 0, resumed.err
    assert f"resumed {output}/checkpoints/global_step{AT_STEP} at step {AT_STEP}" in resumed.out
    assert without_time(output) == without_time(expected)
    ours, theirs = summary(output), summary(expected)
    for key in ("train_loss", "validation_loss", "bigram_entropy", "steps", "samples", "tokens"):
        assert ours[key] == theirs[key], key


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "then"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_goes_on(
    nproc: int, then: int, small: Arguments, whole_run: tuple[Path, Finished], tmp_path: Path
) -> None:
    expected, _ = whole_run
    output = tmp_path / "output"
    first = run(small(output, {"training.steps": 5, "zero_optimization.stage": 3}, "--nproc", str(nproc)))
    assert first.code == 0, first.err
    resumed = run(small(output, {"zero_optimization.stage": 1}, "--nproc", str(then), "--resume", "auto"))
    assert resumed.code == 0, resumed.err
    assert column(output, "loss") == pytest.approx(column(expected, "loss"), abs=1e-5)
    for key in ("step", "lr", "samples", "tokens"):
        assert column(output, key) == column(expected, key)


def test_a_named_checkpoint_of_another_output(
    small: Arguments, whole_run: tuple[Path, Finished], tmp_path: Path
) -> None:
    expected, _ = whole_run
    output = tmp_path / "output"
    resumed = run(small(output, {}, "--resume", str(expected / "checkpoints" / "global_step10")))
    assert resumed.code == 0, resumed.err
    assert column(output, "step") == [11, 12]
    assert column(output, "loss") == column(expected, "loss")[10:]


def test_ctrl_c(faulty: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "output"
    stopped = stop(faulty, output, 1, signal.SIGINT)
    assert stopped.code == 130, stopped.err
    assert f"stopped by SIGINT after step {AT_STEP}" in stopped.out


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once(nproc: int, faulty: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "run" / "output"
    stopped = stop(faulty, output, nproc, signal.SIGINT, signal.SIGINT, go=False)
    assert stopped.code == 130
    assert "Traceback" not in stopped.err
    assert not (output / "checkpoints" / f"global_step{AT_STEP}").exists()
    assert not any(alive(int((output.parent / f"waiting{rank}").read_text())) for rank in range(nproc))


@pytest.mark.slow
def test_a_signal_to_the_whole_group_counts_once(faulty: Arguments, tmp_path: Path) -> None:
    """What a terminal does on Ctrl-C: launcher and ranks all get it."""
    output = tmp_path / "output"
    running = start(faulty(output, "wait", {"model.args.at_forward": AT_STEP}, "--nproc", "2"))
    wait_for(tmp_path / "waiting0", tmp_path / "waiting1")
    os.killpg(running.process.pid, signal.SIGINT)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    stopped = running.finish()
    assert stopped.code == 130, stopped.err
    assert (output / "checkpoints" / "latest").read_text().strip() == f"global_step{AT_STEP}"


def test_a_killed_rank_ends_the_run(faulty: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "output"
    running: Running = start(faulty(output, "wait", {"model.args.at_forward": AT_STEP}, "--nproc", "2"))
    wait_for(tmp_path / "waiting0", tmp_path / "waiting1")
    killed = time.monotonic()
    os.kill(int((tmp_path / "waiting1").read_text()), signal.SIGKILL)
    (tmp_path / "go").touch()
    finished = running.finish(timeout=30)
    assert time.monotonic() - killed < 30
    assert finished.code == 1
    assert "ptrain: rank 1 died (signal 9)" in finished.err
    assert "--resume auto" in finished.err
    assert "Traceback" not in finished.err
    assert not alive(int((tmp_path / "waiting0").read_text()))
    assert {path.name for path in (output / "checkpoints").iterdir()} == {"global_step5", "latest"}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
