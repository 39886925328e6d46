"""Random-LTD in the plan: what it comes to, what is said of it, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ConfigError, load_config
from engine.data.curriculum import difficulty_at
from engine.plan import Degrees, DifficultySchedule, ModelFacts, TokenDropPlan, explain
from engine.plan.findings import Findings
from engine.plan.token_drop import resolve_token_drop
from tests.plan.conftest import BATCH, MakePlan

LTD = "data_efficiency.data_routing.random_ltd"


def section(schedule: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    full = {"min_value": 128, "max_value": 2048, "schedule_config": {"require_steps": 100, "seq_per_step": 16}}
    random_ltd = {"enabled": True, "random_ltd_schedule": {**full, **(schedule or {})}, **changes}
    return {"data_efficiency": {"data_routing": {"random_ltd": random_ltd}}}


def test_token_drop_in_the_plan(make_plan: MakePlan) -> None:
    schedule = DifficultySchedule("fixed_linear", 128, 2048, total_steps=100, step_size=16)
    assert make_plan(section()).token_drop == TokenDropPlan(schedule)
    named = section(
        random_ltd_layer_id=[3, 1], random_ltd_layer_num=2, total_layer_num=5, hidden_state_order="seq_batch_dim"
    )
    assert make_plan(named).token_drop == TokenDropPlan(schedule, (1, 3), 2, 5, "seq_batch_dim")
    assert make_plan({}).token_drop is None
    assert make_plan(section(enabled=False)).token_drop is None


def test_the_printed_plan_says_it(make_plan: MakePlan) -> None:
    text = make_plan(section(random_ltd_layer_id=[1, 2, 3, 5])).render()
    assert "token drop  layers 1-3, 5 keep 128 to 2048 tokens, over 100 steps by 16" in text
    assert "token drop" not in make_plan({}).render()
    (said,) = [entry for entry in explain({**BATCH, **section()}, 1).keys if entry.key == f"{LTD}.enabled"]
    assert "run on a random part of each sequence's tokens" in said.meaning


def test_the_maximum_is_reached_by_any_step(make_plan: MakePlan) -> None:
    """DeepSpeed's own example keeps up to 197 tokens by 8; the steps here are 16."""
    plan = make_plan(section({"min_value": 64, "max_value": 197}))
    assert plan.token_drop is not None
    lengths = {difficulty_at(plan.token_drop.schedule, step) for step in range(1, 200)}
    assert max(lengths) == 197
    assert all(length % 16 == 0 for length in lengths - {197})


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "minimum above maximum": (section({"min_value": 4096}), "random_ltd_schedule.min_value", "at most 2048"),
    "a step that does not divide": (
        section({"min_value": 100}),
        "random_ltd_schedule.schedule_config.seq_per_step",
        "100 = 6 x 16 + 4",
    ),
    "no schedule": (
        {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}},
        "random_ltd_schedule",
        "",
    ),
    "no steps": (
        section({"schedule_config": {"seq_per_step": 16}}),
        "random_ltd_schedule.schedule_config.require_steps",
        "is missing",
    ),
    "a layer twice": (section(random_ltd_layer_id=[1, 1]), "random_ltd_layer_id", "different layers"),
    "a layer that is not there": (
        section(random_ltd_layer_id=[1, 24], total_layer_num=24),
        "random_ltd_layer_id",
        "0 to 23",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sections_that_cannot_be_meant_are_refused(name: str) -> None:
    tree, key, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        load_config({**BATCH, **tree})
    (problem,) = caught.value.problems
    assert problem.path == f"{LTD}.{key}"
    assert words in problem.render()


def test_learning_rates_by_layer_tokens_are_not_built() -> None:
    config = load_config({**BATCH, **section(layer_token_lr_schedule={"enabled": True})})
    assert config.not_built == (f"{LTD}.layer_token_lr_schedule.enabled",)


def test_deepspeeds_numbers_need_no_divisor(make_plan: MakePlan) -> None:
    made = make_plan(section({"min_value": 100, "compat": "deepspeed"})).token_drop
    assert made is not None
    assert made.schedule.deepspeed


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_sequences_that_are_split_are_refused(axis: str) -> None:
    config = load_config({**BATCH, **section()})
    findings = Findings(config)
    resolve_token_drop(config, Degrees(**{axis: 2}), None, findings)
    assert [(problem.path, f"({axis})" in problem.message) for problem in findings.problems] == [
        (f"{LTD}.enabled", True)
    ]
    findings = Findings(config)
    resolve_token_drop(config, Degrees(dp_shard=2, tp=2), None, findings)
    assert not findings.problems


def test_what_the_model_shows() -> None:
    config = load_config({**BATCH, **section(total_layer_num=24)})
    for facts, words in ((ModelFacts(1, 1), "no repeated blocks"), (ModelFacts(1, 1, ("a", "b")), "has 2 blocks")):
        findings = Findings(config)
        resolve_token_drop(config, Degrees(), facts, findings)
        assert [words in problem.message for problem in findings.problems] == [True]
