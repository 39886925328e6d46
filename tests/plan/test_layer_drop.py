"""Layer drop in the plan: what it comes to, what is said of it, and what is refused before anything starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.config import ConfigError, load_config
from engine.plan import LayerDropPlan, explain
from tests.plan.conftest import BATCH, MakePlan, messages


def section(**changes: Any) -> dict[str, Any]:
    return {"progressive_layer_drop": {"enabled": True, **changes}}


def test_layer_drop_in_the_plan(make_plan: MakePlan) -> None:
    assert make_plan(section()).layer_drop == LayerDropPlan(0.5, 0.001)
    assert make_plan(section(theta=0.7, gamma=0.01, compat="deepspeed")).layer_drop == LayerDropPlan(0.7, 0.01, True)
    assert make_plan({}).layer_drop is None
    assert make_plan({"progressive_layer_drop": {"enabled": False, "theta": 0.7}}).layer_drop is None


def test_the_printed_plan_says_it(make_plan: MakePlan) -> None:
    text = make_plan({**section(), "training": {"steps": 5001}}).render()
    assert "layer drop  theta from 1 to 0.5, gamma 0.001; unbiased; theta 0.503 in step 5001" in text
    assert "layer drop" not in make_plan({}).render()


REFUSED = {
    "theta above 1": ({"theta": 1.5}, "theta", "1"),
    "theta 0, whose scale 1 / p has no bound": ({"theta": 0}, "theta", "0"),
    "a negative theta": ({"theta": -0.5}, "theta", "0"),
    "a negative gamma": ({"gamma": -0.1}, "gamma", "0"),
    "another compat": ({"compat": "megatron"}, "compat", "deepspeed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_out_of_range_are_refused(name: str) -> None:
    changes, key, allowed = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        load_config({**BATCH, **section(**changes)})
    (problem,) = caught.value.problems
    assert problem.path == f"progressive_layer_drop.{key}"
    assert allowed in problem.render()


@pytest.mark.parametrize(
    ("changes", "steps", "key", "words"),
    [
        ({"theta": 1.0}, 100, "theta", "no effect: a theta of 1"),
        ({"gamma": 0}, 100, "gamma", "no effect: with a gamma of 0"),
        ({"gamma": 0.001}, 200, "gamma", "theta only falls to 0.91 in the last of 200 steps.*100 / 200 = 0.5"),
    ],
)
def test_what_drops_nothing_is_noted(
    make_plan: MakePlan, changes: dict[str, Any], steps: int, key: str, words: str
) -> None:
    (message,) = messages(
        make_plan({**section(**changes), "training": {"steps": steps}}), f"progressive_layer_drop.{key}"
    )
    assert re.search(words, message)


def test_a_run_that_is_long_enough_needs_no_note(make_plan: MakePlan) -> None:
    assert not [n for n in make_plan({**section(gamma=0.1), "training": {"steps": 1000}}).notes if "theta" in n.message]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("enabled", "towards the end about 25% of a deep model's layers. Evaluation runs all of them."),
        ("theta", "In the end the last layer is kept with probability 0.5, the middle one with 0.75."),
        ("gamma", "Theta is half-way after 69 updates, and 0.5 in the last one."),
    ],
)
def test_it_is_explained(key: str, words: str) -> None:
    explained = explain({**BATCH, **section(theta=0.5, gamma=0.01), "training": {"steps": 1000}}, 1)
    (found,) = [entry for entry in explained.keys if entry.key == f"progressive_layer_drop.{key}"]
    assert found.status == "acts"
    assert words in found.meaning
