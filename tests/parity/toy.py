"""The reference run: a toy GPT, its data, and a plain PyTorch loop that knows nothing of the engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY_SIZE = 256
SEQUENCE_LENGTH = 32
GLOBAL_BATCH = 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
"""eps 1e-6: at 1e-8 Adam turns the rounding noise of gradients that are zero (key biases) into whole steps."""


def gpt_class() -> type[nn.Module]:
    path = Path(__file__).resolve().parents[2] / "examples" / "gpt_text" / "model.py"
    spec = importlib.util.spec_from_file_location("example_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT


def toy_model(seed: int = 0, device: str = "cpu", **changes: Any) -> nn.Module:
    """4 blocks of width 64 with 4 heads and a tied head, unless ``changes`` say otherwise."""
    arguments = {
        "vocabulary_size": VOCABULARY_SIZE,
        "num_blocks": 4,
        "width": 64,
        "num_heads": 4,
        "sequence_length": SEQUENCE_LENGTH,
        **changes,
    }
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return gpt_class()(**arguments)


def toy_batch(step: int, size: int = GLOBAL_BATCH, vocabulary_size: int = VOCABULARY_SIZE) -> dict[str, Tensor]:
    """The samples of one optimizer step, (size, SEQUENCE_LENGTH), the same for every split."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocabulary_size, (size, SEQUENCE_LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def part(batch: dict[str, Tensor], index: int, num_parts: int) -> dict[str, Tensor]:
    return {key: value.chunk(num_parts)[index] for key, value in batch.items()}


@dataclass
class Result:
    """What a run is compared by. ``parameters``: whole masters by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def reference_run(
    *,
    num_parts: int = 1,
    steps: int = 10,
    precision: str = "fp32",
    clip: float = 0.0,
    optimizer: str = "AdamW",
    params: dict[str, Any] | None = None,
    loss_scale: float = 1.0,
    model: nn.Module | None = None,
    frozen: tuple[str, ...] = (),
    shown: Callable[[dict[str, Tensor], int], dict[str, Tensor]] = lambda batch, step: batch,
) -> Result:
    """One process. Each global batch is cut into ``num_parts`` micro-batches, whose gradients are averaged in fp32.

    ``shown(micro_batch, step)``: what the model sees of a micro-batch in a step, which counts from 0.

    16-bit: the forward uses a cast copy of fp32 masters, gradients are cast to fp32 before they are added up.
    """
    model = model or toy_model()
    names = dict(model.named_parameters())
    for name in frozen:
        names[name].requires_grad_(False)
    trained = {name: p for name, p in names.items() if p.requires_grad}
    masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in trained.items()}
    for p in names.values():
        p.data = p.data.to(DTYPES[precision])
    stepper = getattr(torch.optim, optimizer)(masters.values(), **(ADAMW if params is None else params))
    result = Result()
    for step in range(steps):
        losses = []
        total = {name: torch.zeros_like(m) for name, m in masters.items()}
        for index in range(num_parts):
            output = model(**shown(part(toy_batch(step), index, num_parts), step))
            loss = getattr(output, "loss", output)
            (loss * loss_scale / num_parts).backward()
            losses.append(loss.item())
            for name, p in trained.items():
                assert p.grad is not None
                total[name] += p.grad.float()
                p.grad = None
        gradients = [total[name] / loss_scale for name in masters]
        norm = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
        for m, gradient in zip(masters.values(), gradients, strict=True):
            m.grad = gradient * min(1.0, clip / (norm.item() + 1e-6)) if clip else gradient
        stepper.step()
        for name, p in trained.items():
            p.data.copy_(masters[name].detach())
        result.losses.append(sum(losses) / num_parts)
        result.norms.append(norm.item())
    result.parameters = {name: m.detach().clone() for name, m in masters.items()}
    result.parameters |= {name: p.detach().float() for name, p in names.items() if name not in masters}
    return result
