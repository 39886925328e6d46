"""A model over pipeline stages gives what one process gives, under every schedule, ZeRO stage and precision."""

from __future__ import annotations

import functools

import pytest

from tests.parity.compare import assert_equal_to
from tests.parity.pipeline_faults import FAULTS
from tests.parity.pipeline_runs import CLIP, MODEL, SGD, STEPS, Case, all_cases, quick_cases, run_case, run_with
from tests.parity.tiers import tiers
from tests.parity.toy import GLOBAL_BATCH, SEQUENCE_LENGTH, Result, reference_run, toy_model

CASES = all_cases()
QUICK = quick_cases(CASES)
SLOW_OF = 13
"""Every so many of the other cells are in the slow tier; all of them run in `make matrix`."""
TOLERANCES = {
    "fp32": {"losses": 1e-5, "parameters": 1e-5, "norms": 1e-6},
    "bf16": {"losses": 1e-3, "parameters": 1e-3, "norms": 1e-2},
}


@functools.cache
def reference(precision: str, num_parts: int) -> Result:
    return reference_run(
        model=toy_model(**MODEL),
        num_parts=num_parts,
        steps=STEPS,
        precision=precision,
        clip=CLIP,
        optimizer="SGD",
        params=SGD["params"],
    )


def check(case: Case, by_rank: list) -> None:
    parts = 1 if case.precision == "fp32" else case.num_parts
    expected = reference(case.precision, parts)
    assert_equal_to(expected, by_rank, **TOLERANCES[case.precision])
    elements = [facts["elements"] for _, _, facts in by_rank]
    for _, _, facts in by_rank:
        assert facts["evaluations"] == pytest.approx(expected.losses, abs=TOLERANCES[case.precision]["losses"])
        assert facts["counted"] == (STEPS * GLOBAL_BATCH, STEPS * GLOBAL_BATCH * SEQUENCE_LENGTH, STEPS)
    whole = sum(parameter.numel() for parameter in toy_model(**MODEL).parameters())
    assert max(elements) < whole, "a rank holds the whole model"
    assert {axis for axis in by_rank[0][2]["bytes"] if axis == "pp"}, "nothing travelled between stages"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=marks) for case, marks in tiers(CASES, QUICK, SLOW_OF)],
)
def test_cell(ranks, row, case):
    row(case.layout, f"stage {case.stage}", case.precision)
    check(case, ranks(case.world).run(run_case, case, timeout=120))


ODD = [
    Case(2, 2, "1f1b", 0, micro_batches=1),
    Case(2, 2, "zbv", 1, micro_batches=1),
    Case(2, 2, "interleaved_1f1b", 2, micro_batches=3),
    Case(2, 2, "dualpipev", 0, micro_batches=3),
    Case(2, 2, "1f1b", 3, partition=[1, 7]),
    Case(2, 2, "zero_bubble", 0, partition="parameters", micro_batches=2, pieces=3),
]
"""Fewer micro-batches than stages, numbers that ranks do not divide, uneven stages."""


@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case.name}-{case.micro_batches}x{case.pieces}")
def test_odd_numbers(ranks, case):
    check(case, ranks(2).run(run_case, case, timeout=120))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(ranks, name):
    case = Case(2, 2, "zero_bubble" if name == "second_part_left_out" else "1f1b", 1)
    by_rank = ranks(2).run(run_with, name, case, timeout=120)
    assert all(not isinstance(outcome, Exception) for outcome in by_rank), by_rank
    with pytest.raises(AssertionError):
        check(case, by_rank)
