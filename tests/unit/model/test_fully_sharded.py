"""The process groups that stage 3 makes."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

import engine


def num_groups_made(num_blocks: int) -> int:
    """Process groups that this rank is in after `initialize` with a secondary partition, beyond those before it."""
    before = len(dist.distributed_c10d._world.pg_map)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_blocks)))
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 4, "zero_optimization": zero, "optimizer": {"type": "Adam"}}
    model_engine = engine.initialize(model=model, config=config)[0]
    made = len(dist.distributed_c10d._world.pg_map) - before
    model_engine.destroy()
    return made


def test_a_secondary_partition_has_one_mesh_however_many_blocks_there_are(ranks):
    first, few, many = [ranks(4).run(num_groups_made, number) for number in (1, 2, 6)]
    assert many == few, first
