"""Rules across sections, the verdict, and what is told all at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from engine.config import load_config
from engine.config.messages import ConfigError
from engine.plan import ModelFacts, World, plan, verdict
from tests.plan.conftest import MakePlan, ProblemsOf, messages

BATCH = {"train_micro_batch_size_per_gpu": 2}


def test_clipping_is_on_by_default_and_said(make_plan: MakePlan) -> None:
    for settings in ({}, {"gradient_clipping": "auto"}):
        made = make_plan(settings)
        assert made.gradient_clipping == 1.0
        assert messages(made, "gradient_clipping")
    made = make_plan({"gradient_clipping": 0.0})
    assert made.gradient_clipping == 0.0
    assert not messages(made, "gradient_clipping")
    assert make_plan({"gradient_clipping": 0.3}).gradient_clipping == 0.3


def test_an_accelerator_that_was_asked_for_must_be_there(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    (problem,) = problems_of({"device": "cuda"})
    assert problem.path == "device"
    assert "cuda" in problem.message
    for device, world in (("cuda", "cuda"), ("auto", "cpu"), ("auto", "cuda"), ("cpu", "cpu"), ("cpu", "cuda")):
        assert make_plan({"device": device}, device=world).world.device == world


def test_all_problems_come_at_once(problems_of: ProblemsOf) -> None:
    found = problems_of(
        {
            "train_batch_size": 3,
            "fp16": {"enabled": True},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "mics_shard_size": 2},
            "optimizer": {"type": "LBFGS", "params": {}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        },
        2,
    )
    assert {problem.path for problem in found} == {
        "train_batch_size",
        "bf16.enabled",
        "zero_optimization.mics_shard_size",
        "optimizer.type",
        "scheduler.params.total_num_steps",
    }


def test_auto_that_nothing_resolves_is_one_list(problems_of: ProblemsOf, make_plan: MakePlan) -> None:
    (problem,) = problems_of({"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}})
    assert problem.code == "needs-values"
    assert "bf16.enabled, zero_optimization.stage" in problem.message
    made = make_plan({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "steps_per_print": "auto"})
    assert made.zero.stage == 2


def test_supplied_values_count_as_given() -> None:
    settings = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    config = load_config(settings, auto={"train_batch_size": 12, "gradient_clipping": 0.5})
    made = plan(config, World(size=2, local_size=2))
    assert made.batch.micro_batch_size == 6
    assert made.gradient_clipping == 0.5
    assert {value.path: value.origin for value in made.values}["train_batch_size"] == "auto"


def test_the_plan_is_pure() -> None:
    config = load_config({**BATCH, "fp16": {"enabled": True}, "optimizer": {"type": "Muon"}})
    before = config.resolved()
    assert plan(config, World(size=2)) == plan(config, World(size=2))
    assert config.resolved() == before


def test_the_default_world_is_one_process() -> None:
    assert plan(load_config(BATCH)).degrees.dp == 1


def test_planning_loads_no_torch() -> None:
    code = """
import sys
from pathlib import Path
from engine.config import load_config
from engine.plan import World, plan
plan(load_config({"train_batch_size": 4, "optimizer": {"type": "AdamW"}}), World(size=2)).render()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "train_batch_size": st.integers(1, 50) | st.just("auto"),
        "train_micro_batch_size_per_gpu": st.integers(1, 9) | st.just("auto"),
        "gradient_accumulation_steps": st.integers(1, 5) | st.just("auto"),
        "gradient_clipping": st.sampled_from([0, 0.5, "auto"]),
        "fp16": st.fixed_dictionaries({"enabled": st.booleans()}),
        "bf16": st.fixed_dictionaries({"enabled": st.booleans()}),
        "torch_autocast": st.fixed_dictionaries({"enabled": st.booleans(), "dtype": st.sampled_from(["bf16", "fp16"])}),
        "data_types": st.fixed_dictionaries({"grad_accum_dtype": st.sampled_from(["bf16", "fp16", "fp32"])}),
        "prescale_gradients": st.booleans(),
        "gradient_predivide_factor": st.sampled_from([1.0, 2.0]),
        "gradient_allreduce_op": st.sampled_from(["mean", "sum"]),
        "zero_optimization": st.fixed_dictionaries(
            {"stage": st.integers(0, 3)},
            optional={"mics_shard_size": st.integers(1, 5), "zero_hpz_partition_size": st.integers(1, 5)},
        ),
        "optimizer": st.fixed_dictionaries({"type": st.sampled_from(["Adam", "Muon", "SGD", "LBFGS", "a.B"])}),
        "scheduler": st.fixed_dictionaries({"type": st.sampled_from(["WarmupLR", "OneCycle", "StepLR", "OneCycleLR"])}),
        "training": st.fixed_dictionaries({"steps": st.integers(1, 100)}),
    },
)


@run_settings(max_examples=60, deadline=None)
@given(source=SETTINGS, size=st.integers(1, 8))
def test_any_config_is_planned_or_told_why_not(source: dict[str, Any], size: int) -> None:
    config, world = load_config(source), World(size=size, local_size=size)
    judged = verdict(config, world)
    if not judged.trainable:
        assert judged.problems or judged.needs_values or judged.not_built
        with pytest.raises(ConfigError):
            plan(config, world)
        return
    made = plan(config, world)
    batch, degrees = made.batch, made.degrees
    assert batch.global_batch_size == batch.micro_batch_size * batch.accumulation_steps * size
    assert degrees.dp_replicate * degrees.dp_shard == size
    assert degrees.dp_shard == 1 or made.zero.stage > 0
    assert isinstance(made.zero.reshard_after_forward, bool) or degrees.dp_shard % made.zero.reshard_after_forward == 0
    assert all(len(line) <= 120 for line in made.render().split("note")[0].splitlines())


def test_vocabulary(make_plan: MakePlan) -> None:
    assert messages(make_plan({"vocabulary_size": 50257}), "vocabulary_size")
    assert not messages(make_plan({"vocabulary_size": 50304}), "vocabulary_size")


def test_facts_of_the_model(make_plan: MakePlan) -> None:
    stage_3 = {"zero_optimization": {"stage": 3}}
    path = "zero_optimization.stage"
    blocks = ModelFacts(1000, 1000, blocks=("h.0", "h.1"))
    assert not messages(make_plan(stage_3, 2, blocks), path)
    assert "no repeated blocks" in messages(make_plan(stage_3, 2, ModelFacts(1000, 1000)), path)[0]
    assert not messages(make_plan({}, 2, ModelFacts(1000, 1000)), path)
    assert "some ranks hold none" in messages(make_plan(stage_3, 4, ModelFacts(3, 3, blocks=("h.0",))), path)[0]


@pytest.mark.parametrize(
    ("settings", "kind", "exit_code"),
    [
        ({}, "valid", 0),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "needs-values", 0),
        ({"comet": {"enabled": True}}, "not-built", 0),
        ({"comet": {"enabled": False}}, "valid", 0),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "invalid", 2),
    ],
)
def test_verdicts(settings: dict[str, Any], kind: str, exit_code: int) -> None:
    config = load_config({**BATCH, **settings})
    judged = verdict(config)
    assert (judged.kind, judged.exit_code) == (kind, exit_code)
    assert judged.trainable == (kind == "valid")
    first = judged.render().splitlines()[0]
    assert first.startswith("invalid" if kind == "invalid" else "valid")
    if kind == "valid":
        assert plan(config)
    else:
        with pytest.raises(ConfigError):
            plan(config)


def test_a_verdict_names_what_is_lacking() -> None:
    settings = {**BATCH, "optimizer": {"type": "MuSGD", "params": {}}, "seed": "auto"}
    judged = verdict(load_config(settings))
    assert judged.kind == "not-built"
    assert judged.not_built == ("optimizer.type",)
    assert judged.needs_values == ("seed",)
    assert judged.render().splitlines()[:2] == [
        "valid, not built here: optimizer.type",
        "needs values: seed",
    ]
    judged = verdict(load_config({**settings, "train_batch_size": 3}))
    assert judged.render().splitlines()[1:3] == ["not built here: optimizer.type", "needs values: seed"]
