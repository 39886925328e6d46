"""Buckets, groups, and how gradients are divided; keys that change nothing here."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import load_config
from engine.plan.findings import Findings
from engine.plan.ineffective import INEFFECTIVE, STAGE_3_KEYS, ZERO, value_at
from engine.plan.zero import DEFAULT_BUCKET_ELEMENTS, DEFAULT_GROUP_ELEMENTS
from tests.plan.conftest import MakePlan, messages


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bucket_is_derived_or_the_users(make_plan: MakePlan, stage: int) -> None:
    zero = make_plan({"zero_optimization": {"stage": stage}}, 2).zero
    assert (zero.bucket_elements, zero.group_elements) == (DEFAULT_BUCKET_ELEMENTS, 0)
    assert zero.bucket_elements * 4 == 25 * 2**20
    asked = make_plan({"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000}}, 2).zero
    assert asked.bucket_elements == 1000
    auto = make_plan({"zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"}}, 2).zero
    assert auto == zero


def test_a_bucket_of_nothing_is_a_bucket_per_parameter(make_plan: MakePlan) -> None:
    assert make_plan({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}).zero.bucket_elements == 1


@pytest.mark.parametrize("key", ["prefetch_bucket_size", "stage3_prefetch_bucket_size"])
def test_group_is_derived_or_the_users(make_plan: MakePlan, key: str) -> None:
    zero = make_plan({"zero_optimization": {"stage": 3}}, 2).zero
    assert (zero.bucket_elements, zero.group_elements) == (0, DEFAULT_GROUP_ELEMENTS)
    assert make_plan({"zero_optimization": {"stage": 3, key: 77}}, 2).zero.group_elements == 77
    assert make_plan({"zero_optimization": {"stage": 3, key: "auto"}}, 2).zero.group_elements == DEFAULT_GROUP_ELEMENTS


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_division_of_gradients(make_plan: MakePlan, stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    assert make_plan(zero, 4).zero.predivide_factor == 1.0
    assert make_plan({**zero, "gradient_predivide_factor": 2.0}, 4).zero.predivide_factor == 2.0
    assert make_plan({**zero, "prescale_gradients": True}, 4).zero.predivide_factor == 4.0
    assert make_plan({**zero, "gradient_allreduce_op": "sum"}, 4).zero.reduce_op == "sum"


def test_factors_that_cannot_act_are_told(make_plan: MakePlan) -> None:
    made = make_plan({"prescale_gradients": True, "gradient_predivide_factor": 2.0}, 4)
    assert made.zero.predivide_factor == 4.0
    assert messages(made, "gradient_predivide_factor")
    made = make_plan({"gradient_allreduce_op": "sum", "prescale_gradients": True, "gradient_predivide_factor": 2.0}, 4)
    assert made.zero.predivide_factor == 1.0
    assert messages(made, "prescale_gradients")
    assert messages(made, "gradient_predivide_factor")
    assert not messages(make_plan({"prescale_gradients": True}, 4), "prescale_gradients")


def test_every_entry_of_the_table_is_a_key_and_says_why() -> None:
    config = load_config({"tensor_parallel": {"partition_config": {}}})
    for entry in INEFFECTIVE:
        value_at(config, entry.path)
        assert entry.reason
    for key in STAGE_3_KEYS:
        value_at(config, ZERO + key)


@pytest.mark.parametrize(
    ("settings", "path", "told"),
    [
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, ZERO + "contiguous_gradients", True),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": True}}, ZERO + "contiguous_gradients", False),
        ({"zero_optimization": {"stage": 2, "overlap_comm": False}}, ZERO + "overlap_comm", True),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, ZERO + "overlap_comm", False),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 1000}}, ZERO + "allgather_bucket_size", True),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10}},
            ZERO + "stage3_max_live_parameters",
            True,
        ),
        (
            {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 10}},
            ZERO + "stage3_max_live_parameters",
            True,
        ),
        (
            {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": "auto"}},
            ZERO + "max_live_parameters",
            False,
        ),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}, ZERO + "reduce_bucket_size", True),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}, ZERO + "reduce_bucket_size", False),
        ({"fp16": {"enabled": False, "auto_cast": False}}, "fp16.auto_cast", False),
    ],
)
def test_a_key_without_effect_is_told_once_and_only_when_set(
    make_plan: MakePlan, settings: dict[str, Any], path: str, told: bool
) -> None:
    assert len(messages(make_plan(settings), path)) == told
    assert not messages(make_plan({}), path)


def test_findings_know_what_was_given_and_where() -> None:
    findings = Findings(load_config({"train_batch_size": 4, "gradient_clipping": "auto"}))
    assert findings.is_given("train_batch_size")
    assert findings.source("train_batch_size") == "given"
    assert not findings.is_given("gradient_clipping")
    assert findings.is_auto("gradient_clipping")
    assert findings.source("seed") == "default"
