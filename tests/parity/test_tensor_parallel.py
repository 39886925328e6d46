"""Layers split over tp ranks, beside every ZeRO stage, give what one process gives with the whole model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.parity.compare import LOSSES, NORMS, PARAMETERS, assert_close
from tests.parity.runs import config_of
from tests.parity.split_models import MODELS, SplitRun, train_split
from tests.parity.tiers import tiers
from tests.parity.toy import Result, reference_run

SGD = {"type": "SGD", "params": {"lr": 0.05}}
CLIP = 0.5

MESHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2": (2, 2, {}),
    "tp4": (4, 4, {}),
    "dp2 x tp2": (4, 2, {}),
    "hsdp 2 x 2 x tp2": (8, 2, {"mics_shard_size": 2}),
    "hpz 2 of 4 x tp2": (8, 2, {"zero_hpz_partition_size": 2}),
}
"""Name -> ranks, tp, and what goes into `zero_optimization`."""


def assert_equal_to(
    expected: Result,
    by_rank: list[SplitRun],
    losses: float = LOSSES,
    parameters: float = PARAMETERS,
    norms: float = NORMS,
) -> None:
    first = by_rank[0]
    for rank in by_rank[1:]:
        assert rank.result.losses == first.result.losses
        assert rank.result.norms == first.result.norms
        for name, value in first.copies.items():
            assert torch.equal(rank.copies[name], value), f"ranks hold different {name}"
        for name, value in first.result.parameters.items():
            assert torch.equal(rank.result.parameters[name], value), f"ranks see different {name}"
    assert_close(expected, first.result, losses=losses, parameters=parameters, norms=norms)


@functools.cache
def reference(model: str, precision: str, num_parts: int, steps: int) -> Result:
    whole = MODELS[model](1)
    if precision == "fp32":
        return reference_run(model=whole, steps=steps, clip=CLIP)
    return reference_run(
        model=whole,
        num_parts=num_parts,
        steps=steps,
        clip=CLIP,
        precision=precision,
        optimizer="SGD",
        params={"lr": 0.05},
    )


def run(ranks: Any, model: str, mesh: str, stage: int, precision: str, accumulation: int) -> None:
    world, tp, zero = MESHES[mesh]
    steps = 10 if precision == "fp32" and (model, mesh, stage, precision) not in QUICK else 3
    steps = 3 if world == 8 else steps
    config = config_of(
        stage=stage,
        precision=precision,
        accumulation=accumulation,
        clip=CLIP,
        optimizer=None if precision == "fp32" else SGD,
        zero_optimization=zero if stage == 3 else {},
    )
    by_rank = ranks(world).run(train_split, model, config, tp, steps, timeout=300)
    expected = reference(model, precision, world // tp * accumulation, steps)
    tolerances = {} if precision == "fp32" else {"losses": 1e-3, "parameters": 1e-3, "norms": 1e-2}
    assert_equal_to(expected, by_rank, **tolerances)


CELLS = [
    (model, mesh, stage, precision)
    for model in MODELS
    for mesh in MESHES
    for stage in range(4)
    for precision in ("fp32", "bf16")
    if not (model == "qwen3" and mesh == "tp4")
    if not mesh.startswith("hpz") or (model, stage, precision) == ("toy", 3, "fp32")
]
QUICK = {
    ("toy", "tp2", 0, "fp32"),
    ("toy", "tp2", 2, "bf16"),
    ("toy", "dp2 x tp2", 1, "fp32"),
    ("toy", "tp4", 2, "fp32"),
    ("llama", "dp2 x tp2", 3, "fp32"),
    ("llama", "tp4", 0, "bf16"),
    ("llama", "tp2", 1, "fp32"),
    ("gpt2", "tp2", 3, "fp32"),
    ("gpt2", "dp2 x tp2", 2, "fp32"),
    ("gpt2", "dp2 x tp2", 0, "bf16"),
    ("qwen3", "dp2 x tp2", 1, "bf16"),
    ("qwen3", "tp2", 2, "fp32"),
    ("llama", "hsdp 2 x 2 x tp2", 3, "fp32"),
    ("toy, sequence", "tp4", 0, "fp32"),
    ("llama, sequence", "dp2 x tp2", 3, "fp32"),
    ("gpt2, sequence", "tp2", 2, "bf16"),
}
"""Every pair of a mesh, a stage, a precision and a model that matters beside another."""


@pytest.mark.parametrize(
    ("model", "mesh", "stage", "precision"),
    [pytest.param(*cell, id="-".join(map(str, cell)), marks=marks) for cell, marks in tiers(CELLS, QUICK, slow_of=13)],
)
def test_equal_to_one_process(ranks, row, model, mesh, stage, precision):
    row(mesh, f"stage {stage}", precision)
    run(ranks, model, mesh, stage, precision, accumulation=2 if stage == 1 else 1)


LEFT_OUT = {
    "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.5},
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 16,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8},
    },
    "data_efficiency": {
        "data_routing": {
            "random_ltd": {
                "enabled": True,
                "random_ltd_schedule": {
                    "min_value": 8,
                    "max_value": 32,
                    "schedule_config": {"require_steps": 3, "seq_per_step": 8},
                },
            }
        }
    },
}


def test_beside_what_leaves_tokens_and_blocks_out(ranks):
    """Curriculum, random-LTD and layer drop at once: the same tokens and blocks on every tp rank."""
    config = config_of(stage=1, clip=CLIP, **LEFT_OUT)
    small = {"width": 32}
    (alone,) = ranks(1).run(train_split, "toy", config, 1, 4, small, timeout=300)
    by_rank = ranks(4).run(train_split, "toy", config, 2, 4, small, timeout=300)
    assert_equal_to(alone.result, by_rank)
    for rank in by_rank:
        assert rank.facts["tokens"] == alone.facts["tokens"]
        assert rank.facts["bytes"]["tp"] > 0


def test_a_plan_in_the_json_with_norms_on_shards_of_the_sequence(ranks):
    plan = {f"*.{name}_proj": "column" for name in ("q", "k", "v", "gate", "up")}
    plan |= {"*.o_proj": "row", "*.down_proj": "row", "*.embed_tokens": "vocabulary", "*.lm_head": "vocabulary"}
    plan |= {"*.input_layernorm": "sequence", "*.post_attention_layernorm": "sequence"}
    config = config_of(stage=1, clip=CLIP, tensor_parallel={"plan": plan})
    by_rank = ranks(2).run(train_split, "llama", config, 2, 3, timeout=300)
    assert_equal_to(reference("llama", "fp32", 1, 3), by_rank)
