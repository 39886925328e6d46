"""A parity table is worth as much as the faults it notices: each planted one must turn the comparison red."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.parity.compare import assert_equal_to
from tests.parity.faults import FAULTS
from tests.parity.runs import Pieces, config_of, train
from tests.parity.toy import Result, reference_run, toy_model

MODEL = {"num_blocks": 2, "width": 32}
SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
STEPS = 3
CLIP = 0.25
"""Well below every norm of this run, so that clipping acts in each step."""
CELLS = [(stage, name) for stage in range(4) for name, fault in FAULTS.items() if stage in fault.stages]


@functools.cache
def reference() -> Result:
    return reference_run(model=toy_model(**MODEL), steps=STEPS, clip=CLIP, optimizer="SGD", params=SGD)


def train_with_each(stage: int, names: list[str | None]) -> list[tuple[Result, Pieces, dict[str, Any]]]:
    config = config_of(stage=stage, accumulation=2, clip=CLIP, optimizer={"type": "SGD", "params": SGD})
    return [train(config, steps=STEPS, model_arguments=MODEL, fault=name) for name in names]


@pytest.fixture(scope="module")
def outcomes(ranks):
    """By stage and fault, what every rank saw; one start of the ranks per stage."""

    @functools.cache
    def at(stage: int) -> dict[str | None, list[tuple[Result, Pieces, dict[str, Any]]]]:
        names = [None, *(name for cell_stage, name in CELLS if cell_stage == stage)]
        return dict(zip(names, zip(*ranks(2).run(train_with_each, stage, names), strict=True), strict=True))

    return at


@pytest.mark.parametrize("stage", range(4))
def test_without_a_fault_it_is_green(outcomes, stage):
    assert_equal_to(reference(), list(outcomes(stage)[None]))


@pytest.mark.parametrize(("stage", "name"), CELLS)
def test_fault_is_noticed(outcomes, stage, name):
    with pytest.raises(AssertionError):
        assert_equal_to(reference(), list(outcomes(stage)[name]))
