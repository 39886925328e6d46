from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch

from engine import torch_compat
from engine.contracts import EngineError
from engine.optim.client import rebind
from engine.optim.factory import build_inner_optimizers, build_optimizer
from engine.optim.optimizer import EngineOptimizer
from engine.optim.schedule_factory import build_schedule
from engine.plan.plan import OptimizerPlan, SchedulePlan

SHAPES = {"linear.weight": (5, 3), "linear.bias": (5,), "matrix": (4, 4), "empty": (0,)}

OPTIMIZERS = [
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "betas": [0.9, 0.95]}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("SGD", {"lr": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("Adagrad", {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("RAdam", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    ("Rprop", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01, "t0": 3.0, "weight_decay": 0.1}),
    ("Adadelta", {"lr": 0.5}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    ("Lamb", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.01, "weight_decay": 0.1}),
    ("Muon", {"muon": {"lr": 0.02}, "adam": {"lr": 0.01}}),
]
IDS = [f"{name}-{index}" for index, (name, _) in enumerate(OPTIMIZERS)]


def parameters(type_name: str = "") -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    # Adafactor takes means over rows, which an empty tensor has none of; it is given whole parameters only.
    shapes = {name: shape for name, shape in SHAPES.items() if name != "empty" or type_name != "Adafactor"}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(named: dict[str, torch.nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


def groups_of(named: dict[str, torch.nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    return [{"params": list(named.values()), "names": list(named), **options}]


def build(type_name: str, params: dict[str, Any], named: dict[str, torch.nn.Parameter]) -> EngineOptimizer:
    return build_optimizer(OptimizerPlan(type_name, params), groups_of(named))


def equal(left: dict[str, torch.nn.Parameter], right: dict[str, torch.nn.Parameter]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def shards_of(named: dict[str, torch.nn.Parameter]) -> dict[torch.nn.Parameter, list[tuple[str, torch.nn.Parameter]]]:
    """The first half of each parameter, flat, as a rank of two would hold it; nothing of the bias."""
    return {
        p: [] if name == "linear.bias" else [(name, torch.nn.Parameter(p.detach().flatten()[: p.numel() // 2].clone()))]
        for name, p in named.items()
    }


# --- stepping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("type_name", "params"), OPTIMIZERS, ids=IDS)
@pytest.mark.parametrize("factor", [1.0, 0.125, 0.3])
def test_every_optimizer_equals_the_plain_one(type_name: str, params: dict[str, Any], factor: float) -> None:
    """Gradients that come multiplied by 1 / factor, and are multiplied by factor in apply(), give the plain update."""
    ours, plain = parameters(type_name), parameters(type_name)
    start = parameters(type_name)
    optimizer = build(type_name, params, ours)
    references = build_inner_optimizers(OptimizerPlan(type_name, params), groups_of(plain))
    for step in range(20):
        set_gradients(ours, step, 1.0 / factor)
        set_gradients(plain, step)
        optimizer.apply(factor)
        for reference in references:
            reference.step()
        if factor == 0.125:
            assert equal(ours, plain)
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name], rtol=2e-5, atol=2e-6)
        assert ours[name].numel() == 0 or not torch.allclose(ours[name], start[name], atol=1e-4)


@pytest.mark.parametrize(
    ("type_name", "params"), [case for case in OPTIMIZERS if hasattr(torch.optim, case[0]) and case[0] != "Muon"]
)
def test_the_fused_choice_agrees_with_torchs_default_kernels(type_name: str, params: dict[str, Any]) -> None:
    ours, plain = parameters(type_name), parameters(type_name)
    optimizer = build(type_name, params, ours)
    reference = getattr(torch.optim, type_name)(list(plain.values()), **params)
    for step in range(20):
        set_gradients(ours, step, 8.0)
        set_gradients(plain, step)
        optimizer.apply(0.125)
        reference.step()
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("type_name", ["AdamW", "RAdam"])
def test_gradients_hold_the_multiplied_value_after_the_step(type_name: str) -> None:
    named = parameters()
    optimizer = build(type_name, {"lr": 0.01}, named)
    set_gradients(named, 0, 4.0)
    optimizer.apply(0.25)
    expected = parameters()
    set_gradients(expected, 0)
    for name in named:
        torch.testing.assert_close(named[name].grad, expected[name].grad)
    assert not hasattr(optimizer.inner[0], "grad_scale")


def test_the_fused_path_is_taken_for_adam_on_this_device() -> None:
    assert torch_compat.unscales_in_step(build("AdamW", {}, parameters()).inner[0])
    assert not torch_compat.unscales_in_step(build("AdamW", {"foreach": True}, parameters()).inner[0])


def test_factor_zero_is_a_step_with_zero_gradients() -> None:
    named, start = parameters(), parameters()
    optimizer = build("SGD", {"lr": 0.1}, named)
    set_gradients(named, 0)
    optimizer.apply(0.0)
    assert equal(named, start)


def test_a_parameter_without_a_gradient_is_left_alone_and_may_come_later() -> None:
    ours, plain = parameters(), parameters()
    optimizer = build("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, ours)
    reference = torch.optim.SGD(list(plain.values()), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(plain, step)
        if step < 2:
            ours["matrix"].grad = plain["matrix"].grad = None
        before = ours["matrix"].detach().clone()
        optimizer.apply()
        reference.step()
        assert torch.equal(ours["matrix"], before) == (step < 2)
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name])


def test_users_cannot_step_it_or_add_groups() -> None:
    optimizer = build("AdamW", {}, parameters())
    with pytest.raises(EngineError, match=r"engine\.step\(\)"):
        optimizer.step()
    with pytest.raises(EngineError, match="model_parameters"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.apply()
    with pytest.raises(EngineError):
        optimizer.step()


# --- being an Optimizer ----------------------------------------------------------------------------------------


def test_groups_and_state_are_the_inner_ones() -> None:
    named = parameters()
    optimizer = build("Muon", {"muon": {"lr": 0.5}, "adam": {"lr": 0.25}}, named)
    assert isinstance(optimizer, torch.optim.Optimizer)
    inner_groups = [group for inner in optimizer.inner for group in inner.param_groups]
    assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups, inner_groups, strict=True))
    set_gradients(named, 0)
    optimizer.apply()
    assert set(optimizer.state) == set(named.values())
    assert all(inner.state is optimizer.state for inner in optimizer.inner)
    assert "betas" not in optimizer.defaults
    assert "momentum" not in optimizer.defaults


def test_loss_scale_and_zero_grad_come_from_the_engine() -> None:
    named = parameters()
    optimizer = build("AdamW", {}, named)
    assert optimizer.loss_scale == 1.0
    assert optimizer.overflow is False
    set_gradients(named, 0)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in named.values())
    calls = []
    optimizer.bind(loss_scale=lambda: 512.0, zero_gradients=lambda: calls.append("zero"))
    optimizer.zero_grad()
    assert optimizer.loss_scale == 512.0
    assert calls == ["zero"]


@pytest.mark.parametrize("type_name", ["AdamW", "Muon"])
def test_schedulers_accept_it_without_a_warning(type_name: str) -> None:
    named = parameters()
    optimizer = build(type_name, {}, named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        own = build_schedule(SchedulePlan("WarmupLR", {"warmup_num_steps": 3}), optimizer)
        for step in range(3):
            set_gradients(named, step)
            optimizer.apply(0.5)
            torch_schedule.step()
            own.step()
    for group in optimizer.inner[0].param_groups:
        assert group["lr"] == own.get_last_lr()[0]


def test_users_hooks_run_once_per_applied_step() -> None:
    named = parameters()
    optimizer = build("AdamW", {}, named)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    set_gradients(named, 0)
    optimizer.apply()
    assert calls == ["pre", "post"]
    optimizer.initialize_state()
    assert calls == ["pre", "post"]


def test_making_state_is_no_step_to_hooks_and_schedulers() -> None:
    model = parameters()
    client = torch.optim.AdamW(model.values())
    calls: list[str] = []
    client.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = rebind(client, shards_of(model).__getitem__)
    optimizer.initialize_state()
    assert set(optimizer.named_state()) == {"linear.weight", "matrix", "empty"}
    assert calls == []


def test_a_client_adagrad_keeps_its_first_accumulator() -> None:
    model = parameters()
    client = torch.optim.Adagrad(model.values(), initial_accumulator_value=0.25)
    optimizer = rebind(client, shards_of(model).__getitem__)
    state = optimizer.named_state()["matrix"]
    assert torch.equal(state["sum"], torch.full((8,), 0.25))
    assert float(state["step"]) == 0.0


def test_duplicate_and_missing_names_are_refused() -> None:
    parameter = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    with pytest.raises(EngineError, match="w is in the optimizer twice"):
        build_optimizer(OptimizerPlan("SGD"), [{"params": parameter, "names": ["w", "w"]}])
    with pytest.raises(EngineError, match="one name per parameter"):
        EngineOptimizer([torch.optim.SGD(parameter)])


# --- state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("type_name", "params"), OPTIMIZERS, ids=IDS)
def test_initialized_state_changes_nothing(type_name: str, params: dict[str, Any]) -> None:
    """No parameter moves by a bit, and training from there on is what it would have been without it."""
    ours, plain = parameters(type_name), parameters(type_name)
    optimizer, reference = build(type_name, params, ours), build(type_name, params, plain)
    set_gradients(ours, 7)
    gradient = ours["matrix"].grad
    optimizer.initialize_state()
    assert equal(ours, plain)
    assert ours["matrix"].grad is gradient
    stateless = type_name == "SGD" and "momentum" not in params
    assert stateless or set(optimizer.named_state()) == set(ours)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(plain, step)
        optimizer.apply()
        reference.apply()
    assert equal(ours, plain)
    for name, state in reference.named_state().items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.named_state()[name][key])), (name, key)


@pytest.mark.parametrize(("type_name", "params"), OPTIMIZERS, ids=IDS)
@pytest.mark.parametrize("route", ["by_name", "state_dict"])
def test_a_restart_continues_bit_for_bit(type_name: str, params: dict[str, Any], route: str) -> None:
    first_run = parameters(type_name)
    first = build(type_name, params, first_run)
    for step in range(3):
        set_gradients(first_run, step)
        first.apply()
    second_run = parameters(type_name)
    with torch.no_grad():
        for name in second_run:
            second_run[name].copy_(first_run[name])
    second = build(type_name, params, second_run)
    if route == "by_name":
        saved = {
            name: {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
            for name, state in first.named_state().items()
        }
        assert second.load_named_state(saved) == []
        second.load_group_options(json.loads(json.dumps(first.group_options())))
    else:
        second.load_state_dict(copy.deepcopy(first.state_dict()))  # as from a file: torch loads without copying
    for step in range(3, 6):
        set_gradients(first_run, step)
        set_gradients(second_run, step)
        first.apply()
        second.apply()
    assert equal(first_run, second_run)


def test_named_state_loads_in_place_and_tells_what_it_could_not_restore() -> None:
    named = parameters()
    optimizer = build("AdamW", {"amsgrad": True}, named)
    optimizer.initialize_state(["matrix"])
    assert set(optimizer.named_state()) == {"matrix"}
    held = optimizer.named_state()["matrix"]["exp_avg"]
    saved = {
        "matrix": {"step": 4.0, "exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4), "stray": 1},
        "gone": {},
    }
    assert optimizer.load_named_state(saved) == [
        "gone: not a parameter of this optimizer",
        "matrix: max_exp_avg_sq, stray",
    ]
    assert torch.equal(held, torch.ones(4, 4))
    assert float(optimizer.named_state()["matrix"]["step"]) == 4.0
    with pytest.raises(EngineError, match=r"exp_avg of matrix has shape \(2, 2\).*\(4, 4\)"):
        optimizer.load_named_state({"matrix": {"exp_avg": torch.ones(2, 2)}})


def test_group_options_keep_the_layout_and_kernels_of_this_machine() -> None:
    first = build("AdamW", {"lr": 0.1, "foreach": True}, parameters())
    second = build("AdamW", {"lr": 0.2}, parameters())
    fused, names = second.param_groups[0]["fused"], second.param_groups[0]["param_names"]
    second.load_group_options(json.loads(json.dumps(first.group_options())))
    group = second.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (0.1, fused, None)
    assert group["param_names"] is names
    assert isinstance(group["betas"], tuple)
    with pytest.raises(EngineError, match="2 parameter groups"):
        second.load_group_options([{}, {}])


def test_bound_state_dicts_win() -> None:
    optimizer = build("AdamW", {}, parameters())
    loaded: list[dict[str, Any]] = []
    optimizer.bind(state_dict=lambda: {"whole": 1}, load_state_dict=loaded.append)
    assert optimizer.state_dict() == {"whole": 1}
    optimizer.load_state_dict({"whole": 2})
    assert loaded == [{"whole": 2}]
