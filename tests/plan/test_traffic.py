"""The estimate of bytes sent against the ledger of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from engine.config import load_config
from engine.plan import ModelFacts, World, estimate_traffic, plan
from tests.parity.toy import part, toy_batch, toy_model

STEPS = 2


def settings(stage: int, accumulation: int, group_elements: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": group_elements},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def sent_bytes(config: dict[str, Any]) -> tuple[ModelFacts, int]:
    """The toy model, and what this rank sent in its last step."""
    model = toy_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    facts = ModelFacts(count, count, tuple(map(str, range(len(blocks)))), num_block_parameters=largest)
    model_engine, *_ = engine.initialize(model=model, config=config)
    for step in range(STEPS):
        for _ in range(config["gradient_accumulation_steps"]):
            batch = part(toy_batch(step, 4), dist.get_rank(), dist.get_world_size())
            model_engine.backward(model_engine(**batch))
            model_engine.step()
    return facts, sum(model_engine.last_report.bytes_by_axis.values())


@pytest.mark.parametrize(
    ("stage", "accumulation", "group_elements"),
    [(0, 2, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (3, 1, 10**6), (3, 1, 1), (3, 2, 1)],
)
def test_estimate_and_ledger_agree(ranks: Any, stage: int, accumulation: int, group_elements: int) -> None:
    config = settings(stage, accumulation, group_elements)
    for facts, sent in ranks(2).run(sent_bytes, config):
        estimate = estimate_traffic(plan(load_config(config), World(2, 2)), facts)
        assert sent == pytest.approx(estimate.total_bytes, rel=0.05)
