"""Saves of `ptrain`: a disk that is full and one that was, saves in the background, and what is kept."""

from __future__ import annotations

import json
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import Arguments
from tests.jobs.job import Finished, column, run, start, wait_for

AT_STEP = 8
"""After the first save, at step 5, and before the second, at step 10."""
FULL_BYTES = 64 << 10
"""Less than a checkpoint, more than every other file."""


def tags(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir() if not path.name.startswith("."))


def limit_files(folder: Path, rank: int, num_bytes: int) -> None:
    while not (pid := (folder / f"waiting{rank}").read_text()):
        time.sleep(0.01)
    resource.prlimit(int(pid), resource.RLIMIT_FSIZE, (num_bytes, -1))


@pytest.mark.parametrize(("nproc", "background"), [(1, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    nproc: int, background: bool, small: Arguments, faulty: Arguments, whole_run: tuple[Path, Finished], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    changes = {"model.args.at_forward": AT_STEP, "checkpoint.async": background, "zero_optimization.stage": 3}
    running = start(faulty(output, "wait", changes, "--nproc", str(nproc)))
    wait_for(*(tmp_path / f"waiting{rank}" for rank in range(nproc)))
    limit_files(tmp_path, nproc - 1, FULL_BYTES)
    (tmp_path / "go").touch()
    finished = running.finish()
    assert finished.code == 1
    assert "Traceback" not in finished.err
    where = "rank 1: " if nproc == 2 else ""
    reason = f"failed: {where}OSError: [Errno 27] File too large"
    told = [line for line in finished.err.splitlines() if "training goes on" in line]
    assert len(told) == 2, finished.err  # once a save, at steps 10 and 12
    assert all(reason in line for line in told)
    assert "step 12: the run is at its end, but its state is not saved" in finished.err
    assert column(output, "step") == list(range(1, 13))
    assert json.loads((output / "summary.json").read_text())["steps"] == 12
    assert tags(output) == ["global_step5", "latest"]
    assert not list((output / "checkpoints").glob(".*"))
    resumed = run(small(output, {}, "--nproc", str(nproc), "--resume", "auto"))
    assert resumed.code == 0, resumed.err
    assert column(output, "loss") == pytest.approx(column(whole_run[0], "loss"), abs=1e-5)


@pytest.mark.slow
def test_a_disk_that_was_full_for_a_while(faulty: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "output"
    changes = {"model.args.at_forward": AT_STEP, "training.save_interval": 2}
    running = start(faulty(output, "wait", changes))
    wait_for(tmp_path / "waiting0")
    limit_files(tmp_path, 0, FULL_BYTES)
    (tmp_path / "go").touch()
    wait_for_text(running.process.stderr, "step 8: the checkpoint is not saved, training goes on")
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, -1))
    finished = running.finish()
    assert finished.code == 0, finished.err
    assert "global_step6" in tags(output)
    assert "global_step8" not in tags(output)
    assert "global_step12" in tags(output)
    assert (output / "checkpoints" / "latest").read_text() == "global_step12\n"


def wait_for_text(stream: object, text: str) -> None:
    assert any(text in line for line in stream), f"{text!r} did not come"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_saves_in_the_background(small: Arguments, whole_run_of_two: tuple[Path, Finished], tmp_path: Path) -> None:
    expected, _ = whole_run_of_two
    output = tmp_path / "output"
    finished = run(small(output, {"checkpoint.async": True}, "--nproc", "2"))
    assert finished.code == 0, finished.err
    assert tags(output) == tags(expected)
    assert column(output, "loss") == column(expected, "loss")
    for tag in tags(output)[:-1]:
        ours, theirs = (
            (folder / "checkpoints" / tag / "rank_00000.safetensors").read_bytes() for folder in (output, expected)
        )
        assert ours == theirs, tag


@pytest.mark.slow
def test_the_save_of_a_stopped_run_is_on_the_disk(faulty: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "output"
    changes = {"model.args.at_forward": AT_STEP, "checkpoint.async": True}
    running = start(faulty(output, "wait", changes, "--nproc", "2"))
    wait_for(tmp_path / "waiting0", tmp_path / "waiting1")
    running.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    stopped = running.finish()
    assert stopped.code == 143, stopped.err
    assert tags(output) == ["global_step5", "global_step8", "latest"]
    assert (output / "checkpoints" / "latest").read_text() == "global_step8\n"


def test_what_is_kept(small: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "output"
    changes = {
        "training.save_interval": 2,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_every": 6,
        "checkpoint.keep_best": 1,
    }
    assert run(small(output, changes)).code == 0
    losses = {}
    for tag in tags(output)[:-1]:
        manifest = json.loads((output / "checkpoints" / tag / "manifest.json").read_text())
        losses[tag] = manifest["metric"]
    assert {"global_step6", "global_step12"} <= losses.keys()
    assert len(losses) <= 3
    assert min(losses.values()) == losses["global_step12"]  # the loss falls
    assert set(losses) == {"global_step6", "global_step12"}
