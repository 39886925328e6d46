"""What ranks run in parity tests: the engine on the toy GPT, and its parameters put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import engine
from tests.parity.toy import GLOBAL_BATCH, Result, part, toy_batch, toy_model

Pieces = list[tuple[str, tuple[int, ...], int, Tensor]]
"""(name, global shape, start in the flattened parameter, the flat values) of a rank's shards."""


def config_of(
    *,
    stage: int,
    precision: str = "fp32",
    accumulation: int = 1,
    world: int = 1,
    clip: float = 0.0,
    optimizer: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A config of the reference run, cut into ``world * accumulation`` micro-batches."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01}}
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer or adamw,
        "seed": 0,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    for key, value in more.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return config


def train(
    config: dict[str, Any],
    steps: int = 10,
    model_arguments: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
    seed: int = 0,
    dtype: torch.dtype | None = None,
    fault: str | None = None,
) -> tuple[Result, Pieces, dict[str, Any]]:
    """Run ``steps`` steps; ``fault`` names a fault of tests/parity/faults.py to plant. Returns this rank's view."""
    model = toy_model(seed=seed, **(model_arguments or {}))
    if dtype is not None:
        model.to(dtype)
    names = dict(model.named_parameters())
    for name in frozen:
        names[name].requires_grad_(False)
    model_engine, *_ = engine.initialize(model=model, config=config)
    if fault is not None:
        from tests.parity.faults import FAULTS

        FAULTS[fault](model_engine)
    result = step_through(model_engine, steps)
    pieces = pieces_of(model_engine)
    facts = {
        "dtypes": sorted({str(p.dtype) for p in model_engine.module.parameters()}),
        "tied": model_engine.module.head.weight is model_engine.module.token_embedding.weight,
        "skipped": model_engine.skipped_steps,
    }
    model_engine.destroy()
    return result, pieces, facts


def step_through(model_engine: engine.Engine, steps: int, first: int = 0) -> Result:
    return run_steps(model_engine, toy_batch, steps, first)


def run_steps(
    model_engine: engine.Engine, batch: Callable[[int], dict[str, Tensor]], steps: int, first: int = 0
) -> Result:
    """``batch``: the samples of a step, of all ranks and micro-batches."""
    result = Result()
    accumulation, mesh = model_engine.gradient_accumulation_steps(), model_engine.mesh
    for step in range(first, first + steps):
        indices = [micro * mesh.dp_size + mesh.dp_rank for micro in range(accumulation)]
        parts = [part(batch(step), index, accumulation * mesh.dp_size) for index in indices]
        if mesh.degrees["pp"] > 1:
            model_engine.train_batch(iter(parts))
        for micro_batch in parts if mesh.degrees["pp"] == 1 else ():
            model_engine.backward(model_engine(**micro_batch))
            model_engine.step()
        report = model_engine.last_report
        assert report is not None
        result.losses.append(report.loss if report.loss is not None else float("nan"))
        result.norms.append(report.grad_norm if report.grad_norm is not None else float("nan"))
    return result


def pieces_of(model_engine: engine.Engine) -> Pieces:
    shards = [*model_engine.roles.reduction.shards, *model_engine._state._frozen]
    return [
        (s.info.name, s.info.shape, s.start, s.parameter.detach().reshape(-1).float().clone())
        for s in shards
        if s.info.numel
    ]


def assemble(pieces_by_rank: list[Pieces]) -> dict[str, Tensor]:
    """Whole parameters from the ranks' shards. Every element must be there, and replicas must agree to the bit."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for pieces in pieces_by_rank:
        for name, shape, start, values in pieces:
            flat = whole.setdefault(name, torch.zeros(torch.Size(shape).numel()))
            seen = filled.setdefault(name, torch.zeros(flat.numel(), dtype=torch.bool))
            span = slice(start, start + values.numel())
            assert torch.equal(flat[span][seen[span]], values[seen[span]]), f"replicas of {name} differ"
            flat[span] = values
            seen[span] = True
    for pieces in pieces_by_rank:
        for name, shape, _, _ in pieces:
            assert filled[name].all(), f"no rank holds all of {name}"
            whole[name] = whole[name].view(shape)
    return whole


def linear_stack(depth: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
