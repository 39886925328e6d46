"""What a load takes of memory: ``python -m tests.parity.loading_memory save|load STAGE FOLDER``, under torchrun.

"load" prints, in bytes, this rank's share of the state, and the most memory that it held while it loaded: its
parameters, which were there, and whatever the load added.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import engine

WIDTH, NUM_BLOCKS = 2048, 24
"""400 MB in fp32, and twice that in moments."""


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def start(stage: int) -> engine.Engine:
    with torch.device("meta"):
        model = Stack()
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 1},
        "seed": 0,
    }
    return engine.initialize(model=model, config=config)[0]


def memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    torch.set_num_threads(1)
    action, stage, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    model_engine = start(stage)
    if action == "save":
        model_engine.backward(model_engine(torch.ones(1, WIDTH)))
        model_engine.step()
        model_engine.save_checkpoint(folder)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: building the model is not loading
        before = memory_bytes("VmRSS")
        model_engine.load_checkpoint(folder)
        added = memory_bytes("VmHWM") - before
        assert model_engine.optimizer is not None
        named = model_engine.optimizer.named_state()
        shards = [shard.parameter for shard in model_engine.roles.reduction.shards]  # type: ignore[attr-defined]
        moments = [value for state in named.values() for value in state.values() if isinstance(value, Tensor)]
        parameters, moments_bytes = (sum(t.numel() * t.element_size() for t in each) for each in (shards, moments))
        share, peak = parameters + moments_bytes, parameters + added
        print(f"share {share} peak {peak}", flush=True)
    model_engine.destroy()


if __name__ == "__main__":
    main()
