"""A model over pipeline stages gives what one process gives, under every schedule, ZeRO stage and precision."""

from __future__ import annotations

import functools

import pytest

from tests.parity.compare import assert_equal_to
from tests.parity.pipeline_faults import FAULTS
from tests.parity.pipeline_runs import CLIP, MODEL, SGD, STEPS, Case, all_cases, pairwise, run_cases
from tests.parity.toy import GLOBAL_BATCH, SEQUENCE_LENGTH, Result, reference_run, toy_model

CASES = all_cases()
QUICK = pairwise(CASES)
TOLERANCES = {
    "fp32": {"losses": 1e-5, "parameters": 1e-5, "norms": 1e-6},
    "bf16": {"losses": 1e-3, "parameters": 1e-3, "norms": 1e-2},
}
PLANTED = Case(2, 2, "1f1b", 1)


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


@pytest.fixture(scope="module")
def outcomes(ranks):
    """By case, what every rank saw; one start of the ranks for all quick cases of a world."""

    @functools.cache
    def of_world(world: int) -> dict[Case, list]:
        cases = [case for case in QUICK if case.world == world]
        return dict(zip(cases, zip(*ranks(world).run(run_cases, cases, timeout=240), strict=True), strict=True))

    return lambda case: list(of_world(case.world)[case])


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_pairs_of_settings(outcomes, case):
    check(case, outcomes(case))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [2, 4])
def test_every_cell(ranks, world, stage):
    cases = [case for case in CASES if (case.world, case.stage) == (world, stage)]
    for case, by_rank in zip(cases, zip(*ranks(world).run(run_cases, cases, timeout=600), strict=True), strict=True):
        check(case, list(by_rank))


ODD = [
    Case(2, 2, "1f1b", 0, micro_batches=1),
    Case(2, 2, "zbv", 1, micro_batches=1),
    Case(2, 2, "interleaved_1f1b", 2, micro_batches=3),
    Case(2, 2, "dualpipev", 0, micro_batches=3),
    Case(2, 2, "1f1b", 3, partition=[1, 7]),
    Case(2, 2, "zero_bubble", 0, partition="parameters"),
]
"""Fewer micro-batches than stages, numbers that ranks do not divide, uneven stages."""


def test_odd_numbers(ranks):
    by_case = zip(*ranks(2).run(run_cases, ODD, timeout=240), strict=True)
    for case, by_rank in zip(ODD, by_case, strict=True):
        check(case, list(by_rank))


@pytest.fixture(scope="module")
def faulty(ranks):
    names = list(FAULTS)
    cases = [Case(2, 2, "zero_bubble", 1) if name == "second_part_left_out" else PLANTED for name in names]
    by_rank = ranks(2).run(run_cases, cases, names, timeout=240)
    return {name: (case, list(seen)) for name, case, *seen in zip(names, cases, *by_rank, strict=True)}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(faulty, name):
    case, by_rank = faulty[name]
    assert all(not isinstance(outcome, Exception) for outcome in by_rank), by_rank
    with pytest.raises(AssertionError):
        check(case, by_rank)
