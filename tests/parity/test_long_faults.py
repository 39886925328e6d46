"""Faults that an engine which cuts sequences can make: each must turn the comparison with one process red."""

from __future__ import annotations

import functools

import pytest

from tests.parity.compare import assert_equal_to
from tests.parity.long_runs import FAULTS, SPLITS, SPLITS_OF, one_process, train_slices
from tests.parity.runs import config_of

SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
CLIP = 0.25
"""Well below every norm of this run, so that clipping acts in each step."""


def train_with_each(split: str, names: list[str | None]) -> list:
    config = config_of(stage=2, clip=CLIP, optimizer={"type": "SGD", "params": SGD}, **SPLITS[split])
    return [train_slices("toy", config, "masked", fault=name) for name in names]


@pytest.fixture(scope="module")
def outcomes(ranks):
    @functools.cache
    def of(split: str) -> dict:
        names = [None, *(name for name in FAULTS if split in SPLITS_OF.get(name, (split,)))]
        return dict(
            zip(names, zip(*ranks(2).run(train_with_each, split, names, timeout=300), strict=True), strict=True)
        )

    return of


@functools.cache
def reference():
    return one_process("toy", "masked", steps=3, clip=CLIP, optimizer="SGD", params=SGD)


@pytest.mark.parametrize("split", ["sp2", "cp2"])
def test_without_a_fault_it_is_green(outcomes, split):
    assert_equal_to(reference(), list(outcomes(split)[None]))


@pytest.mark.parametrize(
    ("split", "name"),
    [(split, name) for split in ("sp2", "cp2") for name in FAULTS if split in SPLITS_OF.get(name, (split,))],
)
def test_fault_is_noticed(outcomes, split, name):
    with pytest.raises(AssertionError):
        assert_equal_to(reference(), list(outcomes(split)[name]))
