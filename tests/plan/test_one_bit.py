"""The 1-bit optimizers in the plan: what is refused, what is noted, and what the printed plan promises."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import OptimizerPlan
from engine.plan.one_bit import Rounds, rounds
from tests.plan.conftest import MakePlan, ProblemsOf, messages

SWITCH = {"OneBitAdam": "freeze_step", "ZeroOneAdam": "var_freeze_step", "OneBitLamb": "freeze_step"}


def section(name: str, steps: int | None = None, **params: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"optimizer": {"type": name, "params": params}}
    return made if steps is None else {**made, "training": {"steps": steps}}


@pytest.mark.parametrize("name", ["OneBitAdam", "onebitadam", "OnebitAdam", "ZEROONEADAM", "zerooneadam", "OneBitLAMB"])
def test_any_capitals(make_plan: MakePlan, name: str) -> None:
    made = make_plan(section(name, betas=[0.9, 0.99]), 4)
    assert made.optimizer is not None
    assert made.optimizer.type in SWITCH


@pytest.mark.parametrize("name", SWITCH)
def test_defaults(make_plan: MakePlan, name: str) -> None:
    made = make_plan(section(name), 2).optimizer
    assert made is not None
    expected: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    expected |= {"bias_correction": False, "eps_inside_sqrt": False, SWITCH[name]: 100_000}
    if name == "ZeroOneAdam":
        expected |= {"var_update_scaler": 16, "local_step_scaler": 32_678, "local_step_clipper": 16}
    if name == "OneBitLamb":
        expected |= {"max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.9}
        expected |= {"factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1}
    assert {key: made.params[key] for key in expected} == expected


@pytest.mark.parametrize("name", SWITCH)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_is_refused_with_the_reason(problems_of: ProblemsOf, name: str, stage: int) -> None:
    (problem,) = problems_of({**section(name), "zero_optimization": {"stage": stage}}, 2)
    assert problem.path == "zero_optimization.stage"
    assert f"{name} cannot train at stage {stage}" in problem.message
    assert "full all-gather" in problem.message
    assert "set zero_optimization.stage to 0" in problem.repair


@pytest.mark.parametrize("name", SWITCH)
def test_amsgrad_and_a_freeze_before_the_first_step_are_refused(problems_of: ProblemsOf, name: str) -> None:
    (problem,) = problems_of(section(name, amsgrad=True))
    assert problem.path == "optimizer.params.amsgrad"
    (problem,) = problems_of(section(name, **{SWITCH[name]: 0}))
    assert problem.path == f"optimizer.params.{SWITCH[name]}"
    assert "seen no gradient" in problem.message


@pytest.mark.parametrize("key", ["var_update_scaler", "local_step_scaler", "local_step_clipper"])
def test_intervals_count_steps(problems_of: ProblemsOf, key: str) -> None:
    (problem,) = problems_of(section("ZeroOneAdam", **{key: 0}))
    assert problem.path == f"optimizer.params.{key}"


@pytest.mark.parametrize("name", SWITCH)
def test_a_freeze_beyond_training_is_noted(make_plan: MakePlan, name: str) -> None:
    made = make_plan(section(name, 1000, **{SWITCH[name]: 1000}), 2)
    assert any("never reached" in message for message in messages(made, f"optimizer.params.{SWITCH[name]}"))
    made = make_plan(section(name, 1000, betas=[0.9, 0.95], **{SWITCH[name]: 400}), 2)
    assert not any("never reached" in message for message in messages(made, f"optimizer.params.{SWITCH[name]}"))


def test_a_variance_frozen_too_early_is_noted(make_plan: MakePlan) -> None:
    path = "optimizer.params.freeze_step"
    (message,) = messages(make_plan(section("OneBitAdam", freeze_step=200), 2), path)
    assert "after 200 gradients" in message
    assert "to 0.18 of its size" in message
    assert not messages(make_plan(section("OneBitAdam", freeze_step=200, bias_correction=True), 2), path)
    assert not messages(make_plan(section("OneBitAdam", freeze_step=200, betas=[0.9, 0.95]), 2), path)


def test_other_notes(make_plan: MakePlan) -> None:
    made = make_plan(section("OneBitAdam", comm_backend_name="mpi", cuda_aware=True, bias_correction=False))
    assert "on one rank nothing travels" in messages(made, "optimizer.type")[-1]
    assert "process group" in messages(made, "optimizer.params.comm_backend_name")[0]
    assert "process group" in messages(made, "optimizer.params.cuda_aware")[0]
    assert not messages(made, "optimizer.params.bias_correction")
    made = make_plan(section("OneBitAdam", bias_correction=True, compat="deepspeed"), 2)
    assert "DeepSpeed ignores it" in messages(made, "optimizer.params.bias_correction")[0]
    made = make_plan(section("OneBitLamb", freeze_step=50, coeff_beta=0.99, betas=[0.9, 0.9]), 2)
    assert "looks back 100 steps" in messages(made, "optimizer.params.coeff_beta")[0]


def test_the_whole_group_in_one_bucket(make_plan: MakePlan) -> None:
    assert not make_plan(section("OneBitAdam"), 2).zero.whole_groups
    assert make_plan(section("OneBitAdam", compression_unit="group"), 2).zero.whole_groups
    assert not make_plan(section("AdamW"), 2).zero.whole_groups


def test_rounds() -> None:
    adam = OptimizerPlan("OneBitAdam", {"freeze_step": 23_000})
    assert rounds(adam, 152_000) == Rounds(23_000, 129_000)
    assert 16 / rounds(adam, 152_000).bits(16) == pytest.approx(4.89, abs=0.01)
    share = 23 / 152
    assert 16 / rounds(adam, 152_000).bits(16) == pytest.approx(1 / (share + (1 - share) / 16))
    params = {"var_freeze_step": 12_500, "var_update_scaler": 16, "local_step_scaler": 32_678, "local_step_clipper": 16}
    large = rounds(OptimizerPlan("ZeroOneAdam", params), 152_000)
    assert (large.full, large.one_bit) == (153, 12_347 + 61_821)
    assert large.bits(16) == pytest.approx(0.504, abs=0.001)


def test_the_printed_plan_says_when_and_how_much(make_plan: MakePlan) -> None:
    text = " ".join(make_plan(section("OneBitAdam", 10_000, freeze_step=1500), 4).render().split())
    assert "gradients are all-reduced up to step 1,500; from step 1,501 on momentum travels in 1 bit" in text
    assert "of 10,000 steps 1,500 in full, 8,500 in 1 bit: 5.65 bits per parameter and step" in text
    assert "5.66 times less than fp32" in text
    text = " ".join(make_plan(section("ZeroOneAdam", 2000, var_freeze_step=1000), 2).render().split())
    assert "ranks step alone and synchronise in 1 bit" in text
    assert "of 2,000 steps 96 in full, 1,904 in 1 bit" in text
    assert "1 bit" not in make_plan(section("OneBitAdam"), 1).render()
    assert "1 bit" not in make_plan(section("AdamW"), 2).render()
