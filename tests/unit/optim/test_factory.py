from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.contracts import EngineError
from engine.optim.factory import (
    available_optimizers,
    build_inner_optimizers,
    build_optimizer,
    fused_arguments,
    granularity,
    muon_takes,
    optimizer_class,
)
from engine.optim.lamb import Lamb
from engine.optim.lion import Lion
from engine.plan.plan import OptimizerPlan

ELEMENTWISE = [
    "Adam", "AdamW", "SGD", "Adagrad", "RAdam", "NAdam", "Adamax", "RMSprop", "Rprop", "ASGD", "Adadelta", "Lion",
]  # fmt: skip


class Unknown(torch.optim.SGD):
    """A user's optimizer, of which the engine knows nothing."""


def groups(*shapes: tuple[int, ...], **options: Any) -> list[dict[str, Any]]:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    return [{"params": params, "names": [f"p{i}" for i in range(len(shapes))], **options}]


def test_optimizers_by_name_and_by_path() -> None:
    assert optimizer_class("AdamW") is torch.optim.AdamW
    assert optimizer_class("Lamb") is Lamb
    assert optimizer_class("Lion") is Lion
    assert optimizer_class("torch.optim.Muon") is torch.optim.Muon
    assert optimizer_class("engine.optim.lamb.Lamb") is Lamb
    assert {"Adam", "Adafactor", "Muon", "Lamb", "Lion"} <= set(available_optimizers())
    assert not {"Optimizer", "LBFGS", "SparseAdam"} & set(available_optimizers())


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("sgd", "Did you mean 'SGD'"),
        ("AdamX", "Did you mean"),
        ("lr_scheduler", "unknown"),
        ("Optimizer", "unknown"),
        ("no_such_package.Adam", "module 'no_such_package' cannot be imported"),
        ("torch.optim.Nope", "has no 'Nope'"),
        ("torch.nn.Linear", "not a subclass"),
        ("LBFGS", "LBFGS cannot be used.*several times"),
        ("torch.optim.LBFGS", "LBFGS cannot be used"),
        ("SparseAdam", "sparse gradients"),
    ],
)
def test_unusable_types_are_told_in_one_message(type_name: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        optimizer_class(type_name)


@pytest.mark.parametrize("type_name", ELEMENTWISE)
def test_elementwise_optimizers_step_alike_on_slices(type_name: str) -> None:
    """The proof of the table: two halves stepped apart equal the whole."""
    assert granularity(type_name) == "elementwise"
    whole = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))
    halves = [torch.nn.Parameter(part.clone()) for part in whole.detach().flatten().split([5, 7])]
    plan = OptimizerPlan(type_name, {"lr": 0.01, **({} if type_name == "Rprop" else {"weight_decay": 0.1})})
    dense = build_optimizer(plan, [{"params": [whole], "names": ["w"]}])
    sharded = [build_optimizer(plan, [{"params": [half], "names": ["w"]}]) for half in halves]
    for step in range(5):
        gradient = torch.randn(12, generator=torch.Generator().manual_seed(step))
        whole.grad = gradient.view(3, 4).clone()
        for half, part in zip(halves, gradient.split([5, 7]), strict=True):
            half.grad = part.clone()
        for optimizer in (dense, *sharded):
            optimizer.apply(0.5)
    torch.testing.assert_close(torch.cat([half.detach() for half in halves]), whole.detach().flatten())


def test_granularity_of_the_rest() -> None:
    assert granularity("Lamb") == "elementwise"
    assert granularity("Muon") == "whole"
    assert granularity("Adafactor") == "whole"
    assert granularity(Unknown) == "whole"


def test_fused_where_it_exists() -> None:
    cpu = torch.device("cpu")
    for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        assert fused_arguments(cls, cpu) == {"fused": True}
    for unfused in (torch.optim.RAdam, torch.optim.Muon, Lamb, Lion):
        assert fused_arguments(unfused, cpu) == {}
    (inner,) = build_inner_optimizers(OptimizerPlan("AdamW", {"foreach": False, "fused": False}), groups((2,)))
    assert inner.param_groups[0]["fused"] is False
    (inner,) = build_inner_optimizers(OptimizerPlan("SGD", {"momentum": 0.9, "dampening": 0.5}), groups((2,)))
    assert not inner.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (OptimizerPlan("AdamW", {"lrate": 1}), r"optimizer\.params\.lrate is not a parameter of AdamW.*lr=0\.001"),
        (OptimizerPlan("AdamW", {"lr": "auto"}), "do not suit AdamW"),
        (OptimizerPlan("AdamW", {"betas": [0.9, 1.5]}), "do not suit AdamW.*beta"),
        (OptimizerPlan("SGD", {"nesterov": True}), "Nesterov"),
        (OptimizerPlan("Lamb", {"max_grad_norm": 1.0}), "gradient_clipping"),
        (OptimizerPlan("Lamb", {"amsgrad": True}), "amsgrad"),
        (OptimizerPlan("Lamb", {"compat": "apex"}), "compat"),
        (OptimizerPlan("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}), "min_coeff"),
        (OptimizerPlan("Lion", {"betas": [0.9, 1.0]}), "betas"),
        (OptimizerPlan("Muon", {"lr": 0.02}), "lr is in neither"),
    ],
)
def test_parameters_that_do_not_suit_are_told_in_one_message(plan: OptimizerPlan, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        build_inner_optimizers(plan, groups((2, 2)))


def test_json_lists_become_tuples_and_group_options_win() -> None:
    plan = OptimizerPlan("AdamW", {"betas": [0.8, 0.9], "weight_decay": 0.1})
    given = groups((2,), weight_decay=0.0)
    (inner,) = build_inner_optimizers(plan, given)
    group = inner.param_groups[0]
    assert group["betas"] == (0.8, 0.9)
    assert group["weight_decay"] == 0.0
    assert group["param_names"] == ["p0"]
    assert set(given[0]) == {"params", "names", "weight_decay"}


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    named = {
        "embed.weight": (9, 4), "block.linear.weight": (4, 4), "block.linear.bias": (4,), "conv.weight": (4, 4, 3),
        "lm_head.weight": (9, 4), "block.up.weight": (8, 4),
    }  # fmt: skip
    params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in named.items()}
    assert [name for name, shape in named.items() if muon_takes(name, len(shape))] == [
        "block.linear.weight", "block.up.weight",
    ]  # fmt: skip
    first = {name: params[name] for name in list(params)[:3]}
    second = {name: params[name] for name in list(params)[3:]}
    given = [
        {"params": list(part.values()), "names": list(part), "weight_decay": decay}
        for part, decay in ((first, 0.5), (second, 0.25))
    ]
    muon, adam = build_inner_optimizers(OptimizerPlan("Muon", {"muon": {"lr": 0.02}, "adam": {"lr": 3e-4}}), given)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adam, torch.optim.AdamW)
    assert [group["param_names"] for group in muon.param_groups] == [["block.linear.weight"], ["block.up.weight"]]
    assert [group["param_names"] for group in adam.param_groups] == [
        ["embed.weight", "block.linear.bias"],
        ["conv.weight", "lm_head.weight"],
    ]
    assert [group["weight_decay"] for group in (*muon.param_groups, *adam.param_groups)] == [0.5, 0.25, 0.5, 0.25]
    assert {group["lr"] for group in muon.param_groups} == {0.02}
    assert {group["lr"] for group in adam.param_groups} == {3e-4}


def test_muon_refuses_a_slice_of_a_matrix() -> None:
    """With the true number of dimensions at hand, a 1-D slice is not quietly given to AdamW."""
    sliced = groups((8,), global_ndim=[2])
    with pytest.raises(EngineError, match="Muon"):
        build_inner_optimizers(OptimizerPlan("Muon"), sliced)


@pytest.mark.parametrize("type_name", [*ELEMENTWISE, "Muon", "Adafactor", "Lamb"])
def test_a_rank_without_parameters_has_the_same_groups(type_name: str) -> None:
    plan = OptimizerPlan(type_name)
    here = build_optimizer(plan, groups((2, 2)))
    elsewhere = build_optimizer(plan, groups())
    assert len(here.param_groups) == len(elsewhere.param_groups)
    elsewhere.initialize_state()
    elsewhere.apply(0.5)
    assert elsewhere.named_state() == {}
