"""Each mistake that splitting layers can make turns the comparison with one process red."""

from __future__ import annotations

import functools

import pytest

from tests.parity.runs import config_of
from tests.parity.split_faults import FAULTS, STAGES
from tests.parity.split_models import SplitRun, toy, train_split
from tests.parity.test_tensor_parallel import assert_equal_to
from tests.parity.toy import Result, reference_run

MODEL = {"num_blocks": 1, "width": 32}
SGD = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
STEPS, CLIP = 2, 0.25


@functools.cache
def reference() -> Result:
    return reference_run(model=toy(1, **MODEL), steps=STEPS, clip=CLIP, optimizer="SGD", params=SGD)


def train_with_each(stage: int, names: list[str | None]) -> list[SplitRun]:
    config = config_of(stage=stage, clip=CLIP, optimizer={"type": "SGD", "params": SGD})
    return [train_split("toy", config, 2, STEPS, MODEL, fault=name) for name in names]


@pytest.fixture(scope="module")
def outcomes(ranks):
    """What every rank saw by fault; one start of the ranks for all."""

    @functools.cache
    def at(stage: int, world: int) -> dict[str | None, list[SplitRun]]:
        names = [None, *(name for name in FAULTS if stage in STAGES.get(name, (stage,)))]
        by_rank = ranks(world).run(train_with_each, stage, names, timeout=300)
        return dict(zip(names, zip(*by_rank, strict=True), strict=True))

    return at


@pytest.mark.parametrize(("stage", "world"), [(1, 2), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_without_a_fault_it_is_green(outcomes, stage, world):
    assert_equal_to(reference(), list(outcomes(stage, world)[None]))


@pytest.mark.parametrize(
    ("stage", "world", "name"),
    [
        pytest.param(stage, world, name, marks=[pytest.mark.slow] if stage == 3 else [])
        for stage, world in ((1, 2), (3, 4))
        for name in FAULTS
        if stage in STAGES.get(name, (stage,))
    ],
)
def test_fault_is_noticed(outcomes, stage, world, name):
    with pytest.raises(AssertionError):
        assert_equal_to(reference(), list(outcomes(stage, world)[name]))
