"""Dtypes and loss scaling, each rule both ways."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.conftest import MakePlan, ProblemsOf, messages

ON = {"enabled": True}


def test_fp32_by_default(make_plan: MakePlan) -> None:
    precision = make_plan({}).precision
    assert (precision.compute, precision.accumulate, precision.reduce, precision.autocast) == (
        "fp32",
        "fp32",
        "fp32",
        None,
    )
    assert precision.buffers is None
    assert precision.check_overflow
    assert not precision.loss_scale.dynamic
    assert precision.loss_scale.static == 1.0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_models_accumulate_and_reduce_in_fp32_and_say_so(make_plan: MakePlan, dtype: str) -> None:
    made = make_plan({dtype: ON})
    assert (made.precision.compute, made.precision.accumulate, made.precision.reduce) == (dtype, "fp32", "fp32")
    (note,) = messages(made, "data_types.grad_accum_dtype")
    assert f"the {dtype} model are accumulated and reduced in fp32" in note
    (note,) = messages(make_plan({dtype: ON, "data_types": {"grad_accum_dtype": dtype}}), "communication_data_type")
    assert "are reduced in fp32" in note
    asked = make_plan({dtype: ON, "data_types": {"grad_accum_dtype": dtype}, "communication_data_type": dtype})
    assert (asked.precision.accumulate, asked.precision.reduce) == (dtype, dtype)
    assert not messages(asked, "data_types.grad_accum_dtype")
    assert not messages(asked, "communication_data_type")


@pytest.mark.parametrize(("model", "accumulate"), [(None, "bf16"), (None, "fp16"), ("bf16", "fp16"), ("fp16", "bf16")])
def test_accumulation_dtypes_that_do_not_go_together(
    problems_of: ProblemsOf, model: str | None, accumulate: str
) -> None:
    settings: dict[str, Any] = {"data_types": {"grad_accum_dtype": accumulate}}
    (problem,) = problems_of(settings | ({model: ON} if model else {}))
    assert problem.path == "data_types.grad_accum_dtype"
    assert accumulate in problem.message


def test_one_precision_at_a_time(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of({"fp16": ON, "bf16": ON})
    assert "both on" in problem.message
    for dtype in ("fp16", "bf16"):
        (problem,) = problems_of({dtype: ON, "torch_autocast": {"enabled": True, "dtype": "bf16"}})
        assert problem.path == "torch_autocast.enabled"


def test_param_dtype_must_be_the_enabled_one(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    assert make_plan({"bf16": ON, "data_types": {"param_dtype": "bf16"}}).precision.compute == "bf16"
    (problem,) = problems_of({"data_types": {"param_dtype": "bf16"}})
    assert "bf16.enabled to true" in problem.repair
    (problem,) = problems_of({"bf16": ON, "data_types": {"param_dtype": "fp32"}})
    assert "bf16.enabled to false" in problem.repair


def test_autocast(make_plan: MakePlan) -> None:
    made = make_plan({"torch_autocast": ON})
    assert (made.precision.compute, made.precision.autocast) == ("fp32", "bf16")
    assert messages(made, "torch_autocast.dtype")
    made = make_plan(
        {"torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    )
    assert messages(made, "torch_autocast.lower_precision_safe_modules")
    assert not messages(made, "torch_autocast.dtype")
    assert not made.precision.loss_scale.dynamic


def test_autocast_to_fp16_scales_the_loss_by_the_fp16_keys(make_plan: MakePlan, problems_of: ProblemsOf) -> None:
    autocast = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
    made = make_plan({**autocast, "fp16": {"enabled": False, "initial_scale_power": 8}})
    assert made.precision.compute == "fp32"
    assert made.precision.loss_scale.dynamic
    assert made.precision.loss_scale.initial == 256
    (problem,) = problems_of({**autocast, "fp16": {"initial_scale_power": 2, "min_loss_scale": 8}})
    assert problem.path == "fp16.min_loss_scale"


def test_dynamic_and_static_loss_scale(make_plan: MakePlan) -> None:
    section = {
        "enabled": True, "initial_scale_power": 10, "loss_scale_window": 50, "hysteresis": 3,
        "consecutive_hysteresis": True, "min_loss_scale": 4,
    }  # fmt: skip
    scale = make_plan({"fp16": section}).precision.loss_scale
    assert scale.dynamic
    assert (scale.initial, scale.window_steps, scale.hysteresis) == (1024.0, 50, 3)
    assert (scale.consecutive_hysteresis, scale.minimum) == (True, 4.0)
    scale = make_plan({"fp16": {"enabled": True, "loss_scale": 128}}).precision.loss_scale
    assert not scale.dynamic
    assert (scale.static, scale.initial) == (128.0, 128.0)


def test_non_finite_gradients_are_skipped_unless_bf16_opts_out(make_plan: MakePlan) -> None:
    made = make_plan({"bf16": {"enabled": True, "check_grad_overflow": False}})
    assert not made.precision.check_overflow
    assert messages(made, "bf16.check_grad_overflow")
    assert make_plan({"bf16": ON}).precision.check_overflow
    assert make_plan({"fp16": ON, "bf16": {"check_grad_overflow": False}}).precision.check_overflow


def test_buffers(make_plan: MakePlan) -> None:
    assert make_plan({"bf16": ON, "data_types": {"buffer_dtype": "bf16"}}).precision.buffers == "bf16"
