"""What every test shares: the ranks, and one thread per process so that sums are the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(world_size).run(function, *args)``; see tests/harness.py."""
    processes = Ranks()
    yield processes
    processes.shutdown()
