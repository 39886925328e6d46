"""Layer drop written out: a plain loop over the blocks of the toy GPT with an explicit gate at each.

Slow and obvious; of the engine it uses only the stream of random numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.random import stream_seed
from tests.parity.toy import ADAMW, DTYPES, GLOBAL_BATCH, SEQUENCE_LENGTH, Result, part, toy_batch


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


@dataclass
class Recount:
    """What a run sees and leaves out. ``whole_windows``: how often a layer was left out in a whole step."""

    seen: int = 0
    layers: int = 0
    layer_tokens: int = 0
    skipped_steps: int = 0
    whole_windows: int = 0
    by_step: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Tokens seen, tokens computed, layers skipped, steps skipped: totals after each step."""


def recount(
    drop: Drop,
    *,
    steps: int,
    num_layers: int,
    accumulation: int,
    dp: int,
    samples: int = GLOBAL_BATCH,
    length: Callable[[int], int] = lambda applied: SEQUENCE_LENGTH,
    dropped: Callable[[int, int, int], int] = lambda layer, size, applied: 0,
    skipped: Callable[[int], bool] = lambda step: False,
) -> Recount:
    """By brute force: every layer of every sample. ``length(applied steps)`` of a sequence; ``dropped(layer, length,
    applied steps)``: the tokens of it that pass by a layer which is kept."""
    found, applied = Recount(), 0
    for step in range(steps):
        never_kept = set(range(1, num_layers + 1))
        for micro in range(accumulation):
            gates = {layer: drop.gate(step, micro, layer, num_layers, applied)[0] for layer in range(1, num_layers + 1)}
            never_kept -= {layer for layer, kept in gates.items() if kept}
            found.layers += dp * list(gates.values()).count(False)
            for _ in range(samples // accumulation):
                found.seen += length(applied)
                for layer, kept in gates.items():
                    found.layer_tokens += dropped(layer, length(applied), applied) if kept else length(applied)
        found.whole_windows += len(never_kept)
        found.skipped_steps += skipped(step)
        applied += not skipped(step)
        computed = found.seen - found.layer_tokens // num_layers
        found.by_step.append((found.seen, computed, found.layers, found.skipped_steps))
    return found


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
    length: Callable[[int], int] = lambda applied: SEQUENCE_LENGTH,
    block_of: Callable[..., Tensor] = lambda block, hidden, layer, place: block(hidden),
    skipped: Callable[[int], bool] = lambda step: False,
    scale: float = 1.0,
) -> Result:
    """One process on fp32 masters. Part i of a global batch is micro-batch i // dp of rank i % dp.

    ``length(applied steps)``: to which sequences are cut. ``block_of(block, hidden, layer, (step, part, applied
    steps))`` computes a kept block. ``skipped(step)``: the gradient is not finite. ``scale``: the loss scale.
    """
    names = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in names.items()}
    for p in names.values():
        p.data = p.data.to(DTYPES[precision])
    stepper = getattr(torch.optim, optimizer)(masters.values(), **(ADAMW if params is None else params))
    result, applied, num_layers = Result(), 0, len(model.blocks)
    for step in range(steps):
        losses = []
        total: dict[str, Tensor] = {}
        for index in range(num_parts):
            batch = {key: rows[:, : length(applied)] for key, rows in part(toy_batch(step), index, num_parts).items()}
            gates = [drop.gate(step, index // dp, layer, num_layers, applied) for layer in range(1, num_layers + 1)]
            loss = gated_loss(model, batch, gates, functools.partial(_placed, block_of, (step, index, applied)))
            (loss * scale / num_parts).backward()
            losses.append(loss.item())
            for name, p in names.items():
                if p.grad is not None:
                    total[name] = total.get(name, torch.zeros(())) + p.grad.float()
                    p.grad = None
        result.losses.append(sum(losses) / num_parts)
        if skipped(step):
            result.norms.append(math.nan)
            continue
        for name, m in masters.items():
            m.grad = total[name] / scale if name in total else None
        norm = torch.cat([m.grad.double().flatten() for m in masters.values() if m.grad is not None]).norm()
        result.norms.append(norm.item())
        stepper.step()
        applied += 1
        for name, p in names.items():
            p.data.copy_(masters[name].detach())
    result.parameters = {name: m.detach().clone() for name, m in masters.items()}
    return result


def _placed(block_of: Callable[..., Tensor], place: tuple[int, int, int], *call: Any) -> Tensor:
    return block_of(*call, place)
