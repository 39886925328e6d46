"""Layer drop written out: a plain loop over the blocks of the toy GPT with an explicit gate at each.

Slow and obvious; of the engine it uses only the stream of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.random import stream_seed
from tests.parity.toy import ADAMW, DTYPES, Result, part, toy_batch

Block = Callable[[nn.Module, Tensor, int, int], Tensor]
"""``block(module, hidden, step, layer)``; layers count from 1."""


@dataclass
class Recount:
    """What a run left out, over all micro-batches: layers, and tokens times layers. ``seen``: tokens in all."""

    seen: int = 0
    layers: int = 0
    layer_tokens: int = 0
    skipped_steps: int = 0
    whole_windows: int = 0
    """How often a layer was left out in all micro-batches of a step."""
    by_step: list[tuple[int, int, int, int]] = field(default_factory=list)


@dataclass
class Drop:
    theta: float = 0.3
    gamma: float = 0.5
    compat: str | None = None
    seed: int = 0

    def theta_at(self, t: int) -> float:
        return (1 - self.theta) * math.exp(-self.gamma * t) + self.theta

    def gate(self, step: int, micro: int, layer: int, num_layers: int, applied: int) -> tuple[bool, float]:
        """(kept, what the residual is multiplied by)."""
        theta = self.theta_at(max(step - 1, 0) if self.compat else applied)
        number = stream_seed(self.seed, "layer_drop", step, micro, layer) / 2**63
        p = 1 - layer / num_layers * (1 - theta)
        drawn_with = 1 - (layer - 1) / num_layers * (1 - theta) if self.compat else p
        return number < drawn_with, 1 / p

    @property
    def section(self) -> dict[str, Any]:
        section = {"enabled": True, "theta": self.theta, "gamma": self.gamma}
        return {"progressive_layer_drop": section | ({"compat": self.compat} if self.compat else {})}


def gated_loss(
    model: Any, batch: dict[str, Tensor], gates: list[tuple[bool, float]], block_of: Callable[..., Tensor]
) -> Tensor:
    tokens, labels = batch["input_ids"], batch["labels"]
    hidden = model.token_embedding(tokens) + model.position_embedding(torch.arange(tokens.shape[1]))
    for layer, (block, (kept, scale)) in enumerate(zip(model.blocks, gates, strict=True), 1):
        if kept:
            after = block_of(block, hidden, layer)
            hidden = after if scale == 1 else hidden + (after - hidden) * scale
    logits = model.head(model.norm(hidden))
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def oracle_run(
    model: Any,
    drop: Drop,
    *,
    steps: int,
    num_parts: int,
    dp: int,
    precision: str = "fp32",
    optimizer: str = "AdamW",
    params: dict[str, Any] | None = None,
    length: Callable[[int], int] = lambda applied: 10**9,
    block_of: Callable[..., Tensor] = lambda block, hidden, layer, place: block(hidden),
    skipped_tokens: Callable[[int, int, int], int] = lambda layer, size, applied: 0,
    poisoned: Callable[[int], bool] = lambda step: False,
    scale_of: Callable[[int], float] = lambda step: 1.0,
) -> tuple[Result, Recount]:
    """One process on fp32 masters. Part i of a global batch is micro-batch i // dp of rank i % dp.

    ``length(applied steps)``: to which sequences are cut. ``block_of(block, hidden, layer, place)`` with ``place`` =
    (step, micro-batch, rank, applied steps) computes a kept block; ``skipped_tokens(layer, length, applied steps)`` is
    how many tokens of a sequence it then leaves out. ``poisoned(step)``: the gradient is not finite, and the step is
    skipped. ``scale_of(step)``: the loss scale.
    """
    names = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in names.items()}
    for p in names.values():
        p.data = p.data.to(DTYPES[precision])
    stepper = getattr(torch.optim, optimizer)(masters.values(), **(ADAMW if params is None else params))
    result, recount, applied, num_layers = Result(), Recount(), 0, len(model.blocks)
    for step in range(steps):
        losses, never_kept = [], set(range(num_layers))
        total: dict[str, Tensor] = {}
        for index in range(num_parts):
            micro, rank = index // dp, index % dp
            batch = {key: rows[:, : length(applied)] for key, rows in part(toy_batch(step), index, num_parts).items()}
            rows, size = batch["input_ids"].shape
            gates = [drop.gate(step, micro, layer, num_layers, applied) for layer in range(1, num_layers + 1)]
            recount.seen += rows * size
            for layer, (kept, _) in enumerate(gates):
                recount.layers += not kept
                out = skipped_tokens(layer, size, applied) if kept else size
                recount.layer_tokens += rows * out
                never_kept -= {layer} if kept else set()
            place = step, micro, rank, applied
            loss = gated_loss(
                model, batch, gates, lambda block, hidden, layer, at=place: block_of(block, hidden, layer, at)
            )
            (loss * scale_of(step) / num_parts).backward()
            losses.append(loss.item())
            for name, p in names.items():
                if p.grad is not None:
                    total[name] = total.get(name, 0) + p.grad.float()
                    p.grad = None
        recount.whole_windows += len(never_kept)
        if poisoned(step):
            recount.skipped_steps += 1
            result.norms.append(float("nan"))
        else:
            for name, m in masters.items():
                m.grad = total[name] / scale_of(step) if name in total else None
            norm = torch.cat([m.grad.double().flatten() for m in masters.values() if m.grad is not None]).norm()
            stepper.step()
            applied += 1
            for name, p in names.items():
                p.data.copy_(masters[name].detach())
            result.norms.append(norm.item())
        result.losses.append(sum(losses) / num_parts)
        counted = (recount.seen, recount.seen - recount.layer_tokens // num_layers)
        recount.by_step.append((*counted, recount.layers, recount.skipped_steps))
    result.parameters = {name: m.detach().clone() for name, m in masters.items()}
    return result, recount
