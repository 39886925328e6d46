"""How many threads a rank gets, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.launch.threads import num_cores, thread_environment

ROOT = Path(__file__).resolve().parents[3]


def test_ranks_share_the_cores() -> None:
    assert thread_environment(1, {}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert thread_environment(2, {})["OMP_NUM_THREADS"] == str(max(1, num_cores() // 2))
    assert thread_environment(10_000, {})["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_stays() -> None:
    assert thread_environment(2, {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}) == {}
    assert thread_environment(1, {"GOMP_SPINCOUNT": "1000"}) == {}


def test_torch_is_not_loaded_before_the_environment_is_set(tmp_path: Path) -> None:
    """`real_world` is the first to load torch, and OpenMP reads its environment then."""
    (tmp_path / "run.json").write_text(
        '{"train_batch_size": 1, "model": {"target": "model.py:Model"}, "training": {"steps": 1}}'
    )
    script = """
import os, sys
from engine.cli import train
def look(*arguments):
    print("torch" in sys.modules, os.environ.get("OMP_WAIT_POLICY"))
    sys.exit(0)
train.real_world = look
train.run(["--config", sys.argv[1]])
"""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run.json")],
        cwd=ROOT,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "False PASSIVE\n", done.stderr
