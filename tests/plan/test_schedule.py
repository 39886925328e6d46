"""Which schedule a config means, where its lengths come from, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import SchedulePlan
from engine.plan.schedule import KNOWN
from tests.plan.conftest import MakePlan, ProblemsOf, messages

OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}


def section(name: str, steps: int | None = None, **params: Any) -> dict[str, Any]:
    training = {} if steps is None else {"training": {"steps": steps}}
    return {**OPTIMIZER, **training, "scheduler": {"type": name, "params": params}}


REQUIRED: dict[str, Any] = {
    "total_num_steps": 10, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "step_size": 3, "milestones": [2, 4], "gamma": 0.5,
    "T_max": 10, "T_0": 5, "base_lr": 0.1, "max_lr": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_names_are_found_in_any_case_and_need_only_what_is_required(
    make_plan: MakePlan, problems_of: ProblemsOf, name: str
) -> None:
    required = {key: REQUIRED[key] for key in KNOWN[name].required}
    if name == "OneCycleLR":
        required["total_steps"] = 10
    made = make_plan(section(name, **required))
    assert made.schedule is not None
    assert made.schedule.type == name
    assert not messages(made, "scheduler.type")
    made = make_plan(section(name.lower(), **required))
    assert made.schedule is not None
    assert made.schedule.type == name
    assert messages(made, "scheduler.type")
    for missing in required:
        less = {key: value for key, value in required.items() if key != missing}
        (problem,) = problems_of(section(name, **less))
        assert problem.path == f"scheduler.params.{missing}"


def test_defaults_are_deepspeeds(make_plan: MakePlan) -> None:
    assert make_plan(section("WarmupLR")).schedule == SchedulePlan(
        "WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
    )
    decay = make_plan(section("WarmupDecayLR", total_num_steps=2000)).schedule
    assert decay is not None
    assert decay.params["warmup_max_lr"] == 0.001
    cosine = make_plan(section("WarmupCosineLR", total_num_steps=2000)).schedule
    assert cosine is not None
    assert (cosine.params["warmup_min_ratio"], cosine.params["cos_min_ratio"]) == (0.0, 0.0001)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_warm_up_may_be_nothing_or_one_step(make_plan: MakePlan, steps: int) -> None:
    made = make_plan(section("WarmupLR", warmup_num_steps=steps)).schedule
    assert made is not None
    assert made.params["warmup_num_steps"] == steps


def test_the_length_is_the_runs_where_it_is_auto_or_left_out(make_plan: MakePlan) -> None:
    for params in ({"total_num_steps": "auto"}, {}):
        made = make_plan(section("WarmupCosineLR", 300, warmup_num_steps=10, **params))
        assert made.schedule is not None
        assert made.schedule.params["total_num_steps"] == 300
    torch_made = make_plan(section("CosineAnnealingLR", 300)).schedule
    assert torch_made == SchedulePlan("CosineAnnealingLR", {"T_max": 300})


def test_auto_that_nothing_resolves(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(section("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto"))
    assert problem.code == "needs-values"
    assert "scheduler.params.total_num_steps" in problem.message
    assert "scheduler.params.warmup_num_steps" in problem.message


def test_auto_peak_is_the_optimizers_rate(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    auto: dict[str, Any] = {
        "warmup_max_lr": "auto",
        "warmup_min_lr": "auto",
        "total_num_steps": 10,
        "warmup_num_steps": 2,
    }
    made = make_plan(section("WarmupDecayLR", **auto)).schedule
    assert made is not None
    assert (made.params["warmup_max_lr"], made.params["warmup_min_lr"]) == (0.5, 0.0)
    settings = section("WarmupDecayLR", **auto)
    del settings["optimizer"]
    (problem,) = problems_of(settings)
    assert problem.code == "needs-values"


def test_lengths_that_do_not_fit_are_told(make_plan: MakePlan) -> None:
    made = make_plan(section("WarmupDecayLR", total_num_steps=10, warmup_num_steps=20))
    assert "longer" in messages(made, "scheduler.params.warmup_num_steps")[0]
    made = make_plan(section("WarmupDecayLR", total_num_steps=20, warmup_num_steps=20))
    assert not messages(made, "scheduler.params.warmup_num_steps")
    made = make_plan(section("WarmupDecayLR", 100, total_num_steps=40, warmup_num_steps=2))
    assert "last 60 the learning rate stays" in messages(made, "scheduler.params.total_num_steps")[0]
    made = make_plan(section("CosineAnnealingLR", 100, T_max=40))
    assert "rises again" in messages(made, "scheduler.params.T_max")[0]
    made = make_plan(section("WarmupDecayLR", 40, total_num_steps=40, warmup_num_steps=2))
    assert not messages(made, "scheduler.params.total_num_steps")


@pytest.mark.parametrize(
    ("name", "params", "path"),
    [
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}, "cycle_first_step_size"),
    ],
)
def test_sizes_that_a_schedule_divides_by(
    problems_of: ProblemsOf, name: str, params: dict[str, Any], path: str
) -> None:
    (problem,) = problems_of(section(name, **params))
    assert problem.path == f"scheduler.params.{path}"


@pytest.mark.parametrize("name", ["LambdaLR", "ReduceLROnPlateau", "SequentialLR"])
def test_schedules_that_json_cannot_express(problems_of: ProblemsOf, name: str) -> None:
    (problem,) = problems_of(section(name))
    assert "JSON cannot hold" in problem.message


def test_parameters_of_torchs_schedules_are_checked_by_name(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(section("StepLR", step_size=3, gama=0.5))
    assert problem.path == "scheduler.params.gama"
    assert "gamma" in problem.repair


def test_classes_by_path(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(section("my.package.Schedule"))
    assert "initialize()" in problem.repair
    torch_made = make_plan(section("torch.optim.lr_scheduler.StepLR", step_size=3)).schedule
    assert torch_made == SchedulePlan("StepLR", {"step_size": 3})


def test_torchs_one_cycle_needs_the_whole_length(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(section("OneCycleLR", 100, max_lr=0.1, total_steps=40))
    assert problem.path == "scheduler.params.total_steps"
    for steps, params in ((100, {}), (100, {"total_steps": 100}), (None, {"epochs": 2, "steps_per_epoch": 5})):
        made = make_plan(section("OneCycleLR", steps, max_lr=0.1, **params)).schedule
        assert made is not None
        assert steps is None or made.params["total_steps"] == steps


def test_a_schedule_without_an_optimizer_waits_for_one(make_plan: MakePlan) -> None:
    settings = section("WarmupLR")
    del settings["optimizer"]
    made = make_plan(settings)
    assert made.schedule is not None
    assert "initialize()" in messages(made, "scheduler.type")[0]
    assert make_plan({}).schedule is None
