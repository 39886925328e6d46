"""A load reads what a rank needs and holds little more than what it keeps."""

from __future__ import annotations

import re

import pytest

from tests.harness import launch_script
from tests.parity.tiers import slow

MODULE = "tests.parity.loading_memory"


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        slow((1, 1), (3, 2)),
        pytest.param((3, 2), (3, 2), marks=pytest.mark.matrix),
        pytest.param((3, 2), (1, 1), marks=pytest.mark.matrix),
    ],
)
def test_the_peak_of_a_load(tmp_path, saved, loaded):
    """(stage, ranks) of a 400 MB model whose moments are twice that."""
    finished = launch_script(saved[1], ["-m", MODULE, "save", str(saved[0]), str(tmp_path)], timeout=250)
    assert finished.returncode == 0, finished.stderr
    finished = launch_script(loaded[1], ["-m", MODULE, "load", str(loaded[0]), str(tmp_path)], timeout=250)
    assert finished.returncode == 0, finished.stderr
    found = re.findall(r"share (\d+) peak (\d+)", finished.stdout)
    assert len(found) == loaded[1]
    total = sum(int(share) for share, _ in found)
    assert total == pytest.approx(3 * 4 * 24 * 2048**2, rel=1e-3)  # nobody holds what another rank owns
    for share, peak in found:
        assert int(peak) < 1.3 * int(share), f"{int(peak) / int(share):.3f} of the share"
