"""Two features in one run give what a plain loop gives that does both by hand, or are refused by the plan, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import REPOSITORY
from tests.parity.composition.features import FEATURES, PLAIN, Cell, cell_of, cells
from tests.parity.composition.page import PAGE, read, render
from tests.parity.composition.table import deviation_of, refusals, tolerance_of

QUICK = (
    ("fp16, one overflow", "1-bit Adam"),
    ("fp16, one overflow", "cp 2"),
    ("Lamb", "layer drop"),
    ("curriculum, reshaped", "random-LTD"),
    ("Adafactor", "random-LTD"),
    ("accumulation", "0/1 Adam"),
    ("0/1 Adam", "layer drop"),
    ("0/1 Adam", "saved and resumed"),
    ("1-bit LAMB", "random-LTD"),
    ("LR schedule", "curriculum, cut"),
    ("curriculum, reshaped", "sp 2"),
    ("curriculum, reshaped", "train_batch"),
    ("curriculum, sampled", "tp 2"),
    ("recomputed activations", "random-LTD"),
    ("recomputed activations", "sp 2"),
    ("recomputed activations", "cp 2"),
    ("layer drop", "tp 2"),
)
"""Pairs that no other test has; the rest runs in `make composition` and `make matrix`."""


def _parameters() -> list[Any]:
    quick = {cell_of(*pair).name for pair in QUICK}
    return [
        pytest.param(cell, id=cell.name, marks=[] if cell.name in quick else pytest.mark.matrix) for cell in cells()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("composition")


@pytest.mark.parametrize("cell", _parameters())
def test_pair(ranks: Any, folder: Path, cell: Cell) -> None:
    if refused := refusals(cell):
        assert all(problem.repair for problem in refused)
        return
    deviation = deviation_of(cell, ranks, folder)
    assert deviation.within(tolerance_of(cell)), deviation


def test_no_feature_is_refused_alone() -> None:
    """So a refusal is of the pair."""
    for feature in FEATURES:
        assert not refusals(Cell(PLAIN, feature)), feature.name


def test_the_page_has_exactly_these_pairs_and_refusals() -> None:
    """Its numbers are those that were measured; all else follows from the features and from the plan."""
    page = (REPOSITORY / PAGE).read_text("utf-8")
    measured, facts = read(page)
    assert render(measured, facts) == page, "run make composition"
    for cell in cells():
        if cell.name in measured:
            bounds = tolerance_of(cell)
            assert float(measured[cell.name]) <= max(bounds.losses, bounds.parameters), cell.name
