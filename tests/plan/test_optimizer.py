"""Which optimizer a config means, and what its constructor gets."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import OptimizerPlan
from engine.plan.optimizer_table import OPTIMIZERS
from tests.plan.conftest import MakePlan, ProblemsOf, messages

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def section(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def test_no_optimizer_is_the_clients_affair(make_plan: MakePlan) -> None:
    assert make_plan({}).optimizer is None


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_names_are_found_in_any_case(make_plan: MakePlan, name: str) -> None:
    expected = "AdamW" if name == "Adam" else name
    for spelling in (name, name.lower(), name.upper()):
        made = make_plan(section(spelling)).optimizer
        assert made is not None
        assert made.type == expected


def test_adam_is_adamw_unless_asked_otherwise(make_plan: MakePlan) -> None:
    made = make_plan(section("Adam", weight_decay=0.1))
    assert made.optimizer == OptimizerPlan("AdamW", {**ADAM, "weight_decay": 0.1})
    assert "AdamW" in messages(made, "optimizer.type")[0]
    made = make_plan(section("Adam", adam_w_mode=False))
    assert made.optimizer == OptimizerPlan("Adam", ADAM)
    assert not messages(made, "optimizer.type")
    made = make_plan(section("AdamW", adam_w_mode=False))
    assert made.optimizer == OptimizerPlan("AdamW", ADAM)
    assert messages(made, "optimizer.params.adam_w_mode")


def test_torch_adam_brings_torchs_default_decay(make_plan: MakePlan) -> None:
    made = make_plan(section("AdamW", torch_adam=True))
    assert made.optimizer == OptimizerPlan("AdamW", {**ADAM, "weight_decay": 0.01})
    assert messages(made, "optimizer.params.torch_adam")
    made = make_plan(section("AdamW", torch_adam=True, weight_decay=0.0))
    assert made.optimizer == OptimizerPlan("AdamW", ADAM)
    made = make_plan(section("Adam", torch_adam=True, adam_w_mode=False))
    assert made.optimizer == OptimizerPlan("Adam", ADAM)


def test_switches_of_deepspeed_do_not_reach_the_constructor(make_plan: MakePlan) -> None:
    made = make_plan(
        section("AdamW", bias_correction=True, set_grad_none=True, fp32_optimizer_states=True, betas=[0.8, 0.9])
    )
    assert made.optimizer == OptimizerPlan("AdamW", {**ADAM, "betas": (0.8, 0.9)})
    assert not messages(made, "optimizer.params.set_grad_none")
    assert messages(make_plan(section("AdamW", set_grad_none=False)), "optimizer.params.set_grad_none")


def test_a_switch_that_would_change_the_result_is_refused(problems_of: ProblemsOf, make_plan: MakePlan) -> None:
    (problem,) = problems_of(section("Adam", bias_correction=False))
    assert problem.path == "optimizer.params.bias_correction"
    (problem,) = problems_of(section("Lamb", amsgrad=True))
    assert problem.path == "optimizer.params.amsgrad"
    lamb = make_plan(section("Lamb", bias_correction=False)).optimizer
    assert lamb is not None
    assert lamb.params["bias_correction"] is False


def test_lamb_gets_all_it_knows(make_plan: MakePlan) -> None:
    made = make_plan(section("lamb", lr=0.01, max_coeff=0.3)).optimizer
    assert made == OptimizerPlan(
        "Lamb",
        {**ADAM, "lr": 0.01, "bias_correction": True, "max_coeff": 0.3, "min_coeff": 0.01, "eps_inside_sqrt": False},
    )


def test_muon_has_two_groups(make_plan: MakePlan) -> None:
    made = make_plan(section("Muon")).optimizer
    assert made is not None
    assert made.params == {
        "muon": {
            "lr": 0.02,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "nesterov": True,
            "ns_steps": 5,
            "adjust_lr_fn": "original",
        },
        "adam": {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    }
    params = {
        "lr": 0.1,
        "adam_lr": 0.2,
        "momentum": 0.8,
        "betas": [0.5, 0.6],
        "eps": 1e-5,
        "weight_decay": 0.3,
        "ns_steps": 3,
    }
    made = make_plan(section("muon", **params)).optimizer
    assert made is not None
    muon, adam = made.params["muon"], made.params["adam"]
    assert (muon["lr"], muon["momentum"], muon["weight_decay"], muon["ns_steps"]) == (0.1, 0.8, 0.3, 3)
    assert adam == {"lr": 0.2, "betas": (0.5, 0.6), "eps": 1e-5, "weight_decay": 0.3}
    made = make_plan(section("Muon", lr=0.1, muon_lr=0.5)).optimizer
    assert made is not None
    assert (made.params["muon"]["lr"], made.params["adam"]["lr"]) == (0.5, 0.1)


def test_a_dotted_path_keeps_its_parameters(make_plan: MakePlan) -> None:
    made = make_plan(section("my.package.Optimizer", rate=3, betas=[0.1, 0.2]))
    assert made.optimizer == OptimizerPlan("my.package.Optimizer", {"rate": 3, "betas": [0.1, 0.2]})
    assert make_plan(section("my.package:Optimizer")).optimizer == OptimizerPlan("my.package.Optimizer", {})


def test_torchs_own_defaults_where_deepspeed_has_none(make_plan: MakePlan) -> None:
    sgd = make_plan(section("sgd", lr=0.1, momentum=0.9)).optimizer
    assert sgd is not None
    assert (sgd.params["lr"], sgd.params["momentum"], sgd.params["nesterov"]) == (0.1, 0.9, False)


@pytest.mark.parametrize("name", ["MuAdam", "muadamw", "MuSGD"])
def test_what_deepspeed_has_and_this_engine_lacks(problems_of: ProblemsOf, name: str) -> None:
    (problem,) = problems_of(section(name))
    assert (problem.path, problem.code) == ("optimizer.type", "not-built")


def test_optimizers_that_cannot_work_here(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(section("LBFGS"))
    assert "several times" in problem.message
    (problem,) = problems_of(section("SparseAdam"))
    assert "sparse" in problem.message


def test_lamb_says_that_it_is_the_papers(make_plan: MakePlan) -> None:
    assert "paper" in messages(make_plan(section("Lamb")), "optimizer.type")[0]


def test_unresolved_parameters_are_one_list_and_others_have_defaults(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(section("AdamW", lr="auto", foreach="auto", weight_decay="auto"))
    assert problem.code == "needs-values"
    assert "optimizer.params.foreach, optimizer.params.lr" in problem.message


def test_origins(make_plan: MakePlan) -> None:
    origins = {value.path: value.origin for value in make_plan(section("AdamW", lr=0.1)).values}
    assert origins["optimizer.params.lr"] == "user"
    assert origins["optimizer.params.eps"] == "default"
