"""Ranks, in a network of their own where they may: loopback's counter around some steps at every stage, beside ledgers.

``python -m tests.unit.collectives.counted_by_kernel WORLD FOLDER`` writes FOLDER/counted.json: for each stage the bytes
that the kernel saw and the sum of what the ledgers of all ranks counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.network import enter_own_network, sent_bytes, why_not_allowed

NUM_STEPS = 3


def main() -> None:
    """The parent of the ranks: they are in its network, which is its own where that is allowed. It must be alone in its
    process, hence no torch before."""
    world, folder = int(sys.argv[1]), sys.argv[2]
    if not why_not_allowed():
        enter_own_network()
    started = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", __spec__.name, "rank", folder]
        started.append(subprocess.Popen(command, env={**os.environ, **place}))
    codes = [process.wait() for process in started]
    sys.exit(max(map(abs, codes)))


def run_rank(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import engine

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    counted = []
    for stage in range(4):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(6)))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, **({"prefetch_bucket_size": 1} if stage == 3 else {})},
        }
        model_engine, *_ = engine.initialize(model=model, config=config)

        def step(model_engine: engine.Engine = model_engine) -> int:
            for _ in range(2):
                model_engine.backward(model_engine(torch.randn(2, 384)).square().mean())
                model_engine.step()
            assert model_engine.last_report is not None
            return model_engine.last_report.comm_bytes

        step()
        dist.barrier()
        before = sent_bytes("lo")
        dist.barrier()  # nobody sends before all have read the counter
        mine = torch.tensor([sum(step() for _ in range(NUM_STEPS))])
        dist.barrier()
        kernel = sent_bytes("lo") - before
        dist.all_reduce(mine)
        counted.append((kernel, int(mine)))
        model_engine.destroy()
    if rank == 0:
        (folder / "counted.json").write_text(json.dumps(counted))
    assert world == dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then hang in the interpreter's own teardown


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(Path(sys.argv[2]))
    else:
        main()
