"""Features beside a pipeline: what is trained is what one process trains without one."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from engine.model.pipeline.cut import StagedModel
from engine.model.pipeline.schedule_runner import ScheduleRunner
from tests.parity.pipeline_models import train, train_each

STAGES = {"pipeline": {"stages": 2}}
SPLIT_BACKWARD = {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}
VIRTUAL = {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}}
SPLIT = {"tensor_parallel": {"size": 2}}
LAYER_DROP = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 2.0}}
TOKEN_DROP = {
    "data_efficiency": {
        "data_routing": {
            "random_ltd": {
                "enabled": True,
                "random_ltd_schedule": {
                    "min_value": 2,
                    "max_value": 12,
                    "schedule_config": {"require_steps": 6, "seq_per_step": 2},
                },
            }
        }
    }
}
CURRICULUM = {
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 4,
        "max_difficulty": 12,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 4},
    }
}
Job = tuple[str, dict[str, Any]]
PAIRS: dict[str, Job] = {
    "layer drop": ("toy", LAYER_DROP | STAGES),
    "layer drop, split backward": ("toy", LAYER_DROP | SPLIT_BACKWARD | {"zero_optimization": {"stage": 3}}),
    "layer drop, recomputed": ("recomputed", LAYER_DROP | VIRTUAL),
    "token drop": ("toy", TOKEN_DROP | STAGES),
    "token drop, pieces": ("toy", TOKEN_DROP | {"pipeline": {"stages": 2, "micro_batches": 8}}),
    "token drop, split backward": ("llama", TOKEN_DROP | SPLIT_BACKWARD),
    "curriculum": ("toy", CURRICULUM | VIRTUAL),
    "curriculum, targets outside": ("tied_layers", CURRICULUM | STAGES),
    "recomputed": ("recomputed", STAGES),
    "recomputed, split backward": ("recomputed", SPLIT_BACKWARD),
}
SPLIT_PAIRS: dict[str, Job] = {
    "tied and split vocabulary": ("gpt2", SPLIT | STAGES | {"zero_optimization": {"stage": 1}}),
    "llama, both ways": ("llama", SPLIT | {"pipeline": {"stages": 2, "schedule": "zbv"}}),
    "token drop on split layers": ("llama", SPLIT | TOKEN_DROP | VIRTUAL),
}


HELD_BY_ALL: Job = ("stored", SPLIT | STAGES)
"""A parameter that both stages and both tp ranks of each hold whole: it counts once in the norm."""


def alone(job: Job) -> dict[str, Any]:
    name, config = job
    return train(name, **{key: value for key, value in config.items() if key not in ("pipeline", "tensor_parallel")})


def check(by_rank: list[Any], expected: dict[str, Any]) -> None:
    for rank in by_rank:
        assert not isinstance(rank, Exception), rank
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert rank["left_out"] == expected["left_out"]
        for parameter, value in expected["whole"].items():
            assert torch.allclose(rank["whole"][parameter], value, rtol=0, atol=1e-5), parameter


@pytest.fixture(scope="module")
def seen(ranks):
    return dict(zip(PAIRS, zip(*ranks(2).run(train_each, [*PAIRS.values()], timeout=300), strict=True), strict=True))


@pytest.mark.parametrize("name", [name for name, (model, _) in PAIRS.items() if model != "recomputed"])
def test_beside_a_pipeline(seen, name):
    check(seen[name], alone(PAIRS[name]))


def test_layers_computed_again_draw_what_they_drew(ranks, seen):
    """Dropout is on, whose masks are a pipeline's own: the run that stores its activations is the reference."""
    jobs = [("stored", config) for model, config in PAIRS.values() if model == "recomputed"]
    stored = zip(*ranks(2).run(train_each, jobs, timeout=300), strict=True)
    for name, by_rank in zip(
        [name for name, (model, _) in PAIRS.items() if model == "recomputed"], stored, strict=True
    ):
        check(seen[name], by_rank[0])


def test_on_split_layers(ranks):
    *by_job, held_by_all = zip(
        *ranks(4).run(train_each, [*SPLIT_PAIRS.values(), HELD_BY_ALL], timeout=300), strict=True
    )
    for job, by_rank in zip(SPLIT_PAIRS.values(), by_job, strict=True):
        check(by_rank, alone(job))
    check(held_by_all, ranks(2).run(train, "stored", timeout=120, **STAGES)[0])


def without_seeds(staged: Any, seed: Any) -> Any:
    return contextlib.nullcontext()


def in_the_first_place(runner: Any, engine: Any, stage: int, index: int) -> Any:
    return engine.roles.saved_work.passing((stage, index), engine._place())


FAULTS = {
    "layers computed again draw anew": ("recomputed", StagedModel, "computing_again", without_seeds),
    "micro-batches share their gates": ("toy", ScheduleRunner, "_passing", in_the_first_place),
}


def train_with(fault: str) -> dict[str, Any]:
    name, owner, method, instead = FAULTS[fault]
    with mock.patch.object(owner, method, instead):
        return train(name, **(LAYER_DROP if name == "toy" else {}), **STAGES)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(ranks, fault):
    by_rank = ranks(2).run(train_with, fault, timeout=120)
    if FAULTS[fault][0] == "toy":
        expected = alone(PAIRS["layer drop"])
    else:
        expected = ranks(2).run(train, "stored", timeout=120, **STAGES)[0]
    with pytest.raises(AssertionError):
        check(by_rank, expected)
