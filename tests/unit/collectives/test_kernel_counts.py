"""What the ledger counts, against the kernel's own counters (Linux: conftest.py)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import REPOSITORY
from tests.network import why_not_allowed
from tests.parity.tiers import slow
from tests.unit.collectives import counted_by_kernel


@pytest.mark.parametrize("world", [2, slow(3)])
def test_the_kernel_counts_the_same(world: int, tmp_path: Path) -> None:
    """What loopback carried in some steps is what the ledgers say, and headers; where ranks may have no network of
    their own, also what others sent."""
    command = [sys.executable, "-m", counted_by_kernel.__name__, str(world), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180)
    assert finished.returncode == 0, finished.stderr
    by_stage = json.loads((tmp_path / "counted.json").read_text())
    assert len(by_stage) == 4
    for stage, (kernel, ledger) in enumerate(by_stage):
        most = math.inf if why_not_allowed() else 1.04 * ledger
        assert ledger <= kernel <= most, f"stage {stage}: {kernel} bytes on loopback, {ledger} in the ledgers"
