"""Writes the checkpoints of tests/reports/deepspeed/ with a real DeepSpeed. Run by hand, not by the tests.

    torchrun --nproc-per-node 2 tests/reports/deepspeed_checkpoint.py tests/reports/deepspeed

needs an environment with DeepSpeed 0.19 (which compiles an extension at first use). Beside each checkpoint lies
``expected.safetensors``: whole parameters, moments and buffers as DeepSpeed itself reports them, and under ``after.``
those after one step more.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRECISIONS = {0: ("fp32", "fp16"), 1: ("fp32", "bf16"), 2: ("fp32", "bf16", "fp16"), 3: ("fp32", "bf16", "fp16")}
CASES: dict[str, dict[str, Any]] = {
    f"stage{stage}_{precision}": {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
    }
    for stage, precisions in PRECISIONS.items()
    for precision in precisions
}
CASES["stage2_fp16"]["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
NUM_STEPS = 4
TAG = f"global_step{NUM_STEPS}"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Toy(nn.Module):
    """What a checkpoint may stumble over: sizes that no rank count divides, tied, frozen and 0-dim parameters, buffers
    of two dtypes and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.hidden = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.fixed = nn.Linear(4, 3)
        self.fixed.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(self.embedding(tokens))
        if self.training:
            self.mean += 0.1 * (x.detach().mean(0) - self.mean).to(self.mean.dtype)
            self.num_calls += 1
        x = self.norm(x - self.mean.to(x.dtype)).tanh()
        logits = self.head(self.fixed(x) * self.scale)
        return F.cross_entropy(logits.float(), (tokens + 1) % 7)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def config_of(case: str) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
        "zero_force_ds_cpu_optimizer": False,
        **CASES[case],
    }


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randint(7, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def reported(model_engine: Any, model: nn.Module, stage: int) -> dict[str, Tensor]:
    """Whole parameters and moments in fp32, as DeepSpeed reports them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = model_engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    masters: dict[Any, Any] = {}  # stage 0: whole, in fp32 of a model in 16 bit
    if stage == 0 and inner is not optimizer:
        for model_group, master_group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters |= dict(zip(model_group, master_group, strict=True))
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False  # its step links the first parameter group only
        optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if stage == 0:
            whole = masters.get(parameter, parameter)
            moments = {key: inner.state[whole][key] for key in MOMENTS}
        else:
            whole = safe_get_full_fp32_param(parameter)
            moments = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        found[f"parameters.{name}"] = whole
        found |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
    return {name: value.detach().float().clone() for name, value in found.items()}


def write(case: str, folder: Path) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from safetensors.torch import save_file

    get_accelerator().is_fp16_supported = lambda: True  # a CPU's fp16 is slow, which does not matter here
    torch.manual_seed(0)
    model = Toy()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model_engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config_of(case))
    stage, rank = model_engine.zero_optimization_stage(), torch.distributed.get_rank()
    dtype = next(model.parameters()).dtype

    def train(step: int) -> None:
        for half in tokens_of(step, rank).chunk(2):
            model_engine.backward(model_engine(half))
            model_engine.step()

    for step in range(NUM_STEPS):
        train(step)
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)  # each rank has its own; the checkpoint has rank 0's
    expected = {
        name: value.view(start_shape(name, start)) for name, value in reported(model_engine, model, stage).items()
    }
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    expected |= {f"parameters.{name}": start[name].to(dtype).float() for name in fixed}
    expected |= {f"buffers.{name}": buffer.clone() for name, buffer in model.named_buffers() if name in start}
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    torch.distributed.barrier()
    model_engine.save_checkpoint(str(folder), client_state={"note": "kept", "epoch": 2})
    train(NUM_STEPS)
    after = reported(model_engine, model, stage)
    expected |= {f"after.{name}": value.view(start_shape(name, start)) for name, value in after.items()}
    if rank == 0:
        save_file(expected, folder / "expected.safetensors")
        for script in folder.glob("*.py"):
            script.unlink()
    model_engine.destroy()


def start_shape(name: str, start: dict[str, Tensor]) -> torch.Size:
    bare = name.partition(".")[2]
    return start[bare if bare in start else bare.rpartition(".")[0]].shape


if __name__ == "__main__":
    for chosen in sys.argv[2:] or list(CASES):
        write(chosen, Path(sys.argv[1]) / chosen)
