"""kill -9 at any moment of a save: what `latest` names loads and is right, and so does every other checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from engine.checkpoint import list_tags
from tests.harness import REPOSITORY
from tests.parity import saver

QUICK, SLOW = 5, 20


@pytest.fixture(scope="module")
def savers():
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.parity.saver"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    yield process
    process.stdin.close()
    assert process.wait(10) == 0


def kill_while_saving(savers, folder, background, seed):
    random = torch.Generator().manual_seed(seed)
    num_saves, delay = 2 + seed % 3, torch.rand((), generator=random).item()
    savers.stdin.write(f"{folder} {background}\n")
    pid = int(savers.stdout.readline())
    try:
        started = 0.0
        for number in range(num_saves):
            if number == num_saves - 1:
                started = time.monotonic()
            assert savers.stdout.readline() == "saved\n"
        # within the time that a step and a save took
        time.sleep(delay * 1.2 * (time.monotonic() - started))
    finally:
        os.kill(pid, signal.SIGKILL)
    while savers.stdout.readline() != "ended\n":
        pass  # what it had still said
    return num_saves


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, QUICK + SLOW))]
)
def test_killed_while_saving(savers, tmp_path, seed):
    background = seed % 2 == 1
    num_saves = kill_while_saving(savers, tmp_path, background, seed)
    model_engine = saver.start(False)
    tags = list_tags(tmp_path)
    assert tags
    for tag in [None, *tags]:
        path, client_state = model_engine.load_checkpoint(tmp_path, tag)
        assert path is not None
        assert client_state["fingerprint"] == saver.fingerprint(model_engine)
        assert path.endswith(f"global_step{model_engine.global_steps}")
        if tag is None:
            # what had been reported is there; in the background, all but the one that was under way
            assert model_engine.global_steps >= num_saves - background
    # the next run goes on, and its first save clears up
    model_engine.load_checkpoint(tmp_path)
    saver.step(model_engine)
    model_engine.save_checkpoint(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert list_tags(tmp_path)[-1] == f"global_step{model_engine.global_steps}"
    model_engine.destroy()
