"""The batch triangle: every pattern of given and missing numbers, and what contradictions say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import load_config
from engine.config.messages import ConfigError, Problem
from engine.plan import BatchPlan, Plan, World, plan

TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def planned(settings: dict[str, Any], size: int = 2, how: str = "") -> Plan:
    return plan(load_config(settings), World(size=size, local_size=size, how=how))


def only_problem(settings: dict[str, Any], size: int = 2, how: str = "") -> Problem:
    with pytest.raises(ConfigError) as caught:
        planned(settings, size, how)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({TOTAL: 24, MICRO: 4, ACCUMULATION: 3}, (24, 4, 3)),
        ({TOTAL: 24, MICRO: 4}, (24, 4, 3)),
        ({TOTAL: 24, ACCUMULATION: 3}, (24, 4, 3)),
        ({MICRO: 4, ACCUMULATION: 3}, (24, 4, 3)),
        ({TOTAL: 24}, (24, 12, 1)),
        ({MICRO: 4}, (8, 4, 1)),
    ],
)
def test_every_solvable_pattern(settings: dict[str, int], expected: tuple[int, int, int]) -> None:
    assert planned(settings).batch == BatchPlan(*expected)
    missing: dict[str, Any] = dict.fromkeys((TOTAL, MICRO, ACCUMULATION), "auto")
    assert planned({**missing, **settings}).batch == BatchPlan(*expected)


def test_accumulation_alone_is_not_enough() -> None:
    problem = only_problem({ACCUMULATION: 3})
    assert TOTAL in problem.message
    assert MICRO in problem.message


def test_nothing_given_is_a_problem_and_auto_needs_values() -> None:
    nothing = only_problem({})
    assert (nothing.path, nothing.code) == (MICRO, "needs-values")
    assert "neither" in nothing.message
    problem = only_problem({TOTAL: "auto", MICRO: "auto"})
    assert problem.code == "needs-values"
    assert TOTAL in problem.message
    assert MICRO in problem.message


def test_origins_say_what_was_given_and_what_follows() -> None:
    origins = {value.path: value.origin for value in planned({TOTAL: 24, MICRO: 4}).values}
    assert (origins[TOTAL], origins[MICRO], origins[ACCUMULATION]) == ("user", "user", "derived")
    origins = {value.path: value.origin for value in planned({MICRO: 4}).values}
    assert (origins[TOTAL], origins[ACCUMULATION]) == ("derived", "default")


def test_a_contradiction_names_all_numbers_and_every_single_repair() -> None:
    problem = only_problem({TOTAL: 24, MICRO: 4, ACCUMULATION: 2}, how="torchrun variables")
    for number in ("24 contradicts", "per_gpu 4", "accumulation_steps 2", "2 data-parallel ranks", "= 16"):
        assert number in problem.message
    assert "world size 2 (torchrun variables)" in problem.message
    for repair in ("train_batch_size 16", "accumulation_steps 3", "per_gpu 6"):
        assert repair in problem.repair


def test_a_remainder_names_the_batch_sizes_that_fit() -> None:
    problem = only_problem({TOTAL: 10, MICRO: 4})
    assert "10 = 1 x 8 + 2" in problem.message
    assert "8 or 16" in problem.repair
    assert f"set {MICRO} to 5" in problem.repair


def test_a_batch_smaller_than_the_world() -> None:
    problem = only_problem({TOTAL: 3}, size=4)
    assert "3 is not a multiple of 4 data-parallel ranks" in problem.message
    assert problem.repair == "set train_batch_size to 4"


def test_the_world_of_one_says_how_it_was_found() -> None:
    how = "no process group and no torchrun or SLURM variables"
    problem = only_problem({TOTAL: 10, MICRO: 4}, size=1, how=how)
    assert f"world size 1 ({how})" in problem.message


def test_a_contradiction_in_a_file_says_which_lines(tmp_path: Any) -> None:
    path = tmp_path / "run.json"
    path.write_text('{\n  "train_batch_size": 10,\n  "train_micro_batch_size_per_gpu": 4\n}\n')
    with pytest.raises(ConfigError) as caught:
        plan(load_config(path), World(size=2, local_size=2))
    (problem,) = caught.value.problems
    assert problem.line == 2
    assert "run.json:3" in problem.message


@given(
    micro=st.integers(1, 10**9), accumulation=st.integers(1, 10**6), dp=st.integers(1, 10**5), hidden=st.integers(0, 2)
)
def test_any_two_of_three_give_the_third_exactly(micro: int, accumulation: int, dp: int, hidden: int) -> None:
    full = {TOTAL: micro * accumulation * dp, MICRO: micro, ACCUMULATION: accumulation}
    shown = {key: value for index, (key, value) in enumerate(full.items()) if index != hidden}
    assert planned(shown, size=dp).batch == BatchPlan(full[TOTAL], micro, accumulation)


def test_unmanaged_accumulation_is_told() -> None:
    made = planned({MICRO: 4, "managed_gradient_accumulation": False})
    assert made.batch.managed is False
    assert any(note.path == "managed_gradient_accumulation" for note in made.notes)
