"""Run by hand on a machine with an accelerator: ``python -m tests.gpu.run``. Prints PASS or FAIL for each check.

Each ZeRO stage and precision trains a small network on one accelerator and is compared with plain PyTorch there. Exit
code 1 when a check fails, 2 where there is no accelerator.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import engine

STEPS, BATCH, WIDTH = 5, 8, 64
LR = 0.05
LOSS_SCALE = {"fp32": 1.0, "bf16": 1.0, "fp16": 128.0}
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Of a loss, relative. In 16 bit the plain run computes the same casts, but a kernel may round differently."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)), nn.Linear(WIDTH, 1))


def batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, BATCH, WIDTH, generator=generator).to(device)
    return [(each, each.sum(-1, keepdim=True)) for each in inputs]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)


def plain_losses(device: torch.device, precision: str) -> list[float]:
    """fp32 masters and a compute copy, written out."""
    masters = build_model().to(device)
    compute = build_model().to(device, DTYPES[precision])
    optimizer = torch.optim.SGD(masters.parameters(), lr=LR)
    losses = []
    for inputs, targets in batches(device):
        loss = loss_of(compute(inputs.to(DTYPES[precision])), targets)
        compute.zero_grad()
        (loss * LOSS_SCALE[precision]).backward()
        for master, copy in zip(masters.parameters(), compute.parameters(), strict=True):
            assert copy.grad is not None
            master.grad = copy.grad.float() / LOSS_SCALE[precision]
        nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, copy in zip(masters.parameters(), compute.parameters(), strict=True):
                copy.copy_(master)
        losses.append(loss.item())
    return losses


def engine_losses(device: torch.device, precision: str, stage: int) -> list[float]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config[precision]["loss_scale"] = LOSS_SCALE[precision]
    model_engine, *_ = engine.initialize(model=build_model(), config=config)
    losses = []
    for inputs, targets in batches(device):
        loss = loss_of(model_engine(inputs), targets)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
    assert model_engine.skipped_steps == 0, "a step was skipped"
    model_engine.destroy()
    return losses


def check(device: torch.device, precision: str, stage: int) -> str:
    """Empty when the losses agree, else what is wrong."""
    try:
        ours, plain = engine_losses(device, precision, stage), plain_losses(device, precision)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    gap = max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))
    return "" if gap <= TOLERANCES[precision] else f"losses differ by {gap:.1e}, allowed {TOLERANCES[precision]:.0e}"


def main() -> int:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("no accelerator here")
        return 2
    failures = 0
    for precision in TOLERANCES:
        for stage in range(4):
            problem = check(device, precision, stage)
            failures += bool(problem)
            print(f"{'FAIL' if problem else 'PASS'} {device.type} stage {stage} {precision} {problem}".rstrip())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
