"""A small split model for what is asked many times: checkpoints, edits, optimizers; and one process beside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.model.tensor_parallel import Split, TensorPlan
from tests.parity.runs import run_steps
from tests.parity.small import GLOBAL_BATCH, config_of, seeded
from tests.parity.toy import Result, part

VOCABULARY_SIZE = 21
WIDTH, HIDDEN, LENGTH = 8, 12, 5


class Block(nn.Module):
    """Gated: two fused halves, of which each rank has a part of both."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        hidden = F.dropout(F.silu(gate) * up, self.dropout, self.training)
        return x + F.dropout(self.down(hidden), self.dropout, self.training)


class Gated(nn.Module):
    """Two blocks between a tied vocabulary of 21 rows, which 2 and 4 ranks share unevenly; a frozen position table,
    a 0-dim parameter, buffers of two kinds. With ``tensor_plan`` for ``tp`` ranks."""

    def __init__(self, tp: int = 1, dropout: float = 0.0, vocabulary_size: int = VOCABULARY_SIZE) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary_size)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.num_calls: Tensor
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        splits = {"embedding": Split("vocabulary"), "head": Split("head")}
        for index in range(2):
            splits[f"blocks.{index}.gate_up"] = Split("column", segments=(HIDDEN, HIDDEN))
            splits[f"blocks.{index}.down"] = Split("row")
        self.tensor_plan = TensorPlan(splits)

    def hidden(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(input_ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return x * self.temperature

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.training:
            self.num_calls += 1
        logits: Tensor = self.head(self.hidden(input_ids))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batch_of(step: int, vocabulary_size: int = VOCABULARY_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3000 + step)
    tokens = torch.randint(vocabulary_size, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def start(tp: int, stage: int, accumulation: int = 1, zero: dict[str, Any] | None = None, **more: Any) -> engine.Engine:
    config = config_of(stage, accumulation, tensor_parallel={"size": tp}, **more)
    config["zero_optimization"] |= zero or {}
    return engine.initialize(model=seeded(Gated), config=config)[0]


def go_on(model_engine: engine.Engine, steps: int, first: int = 0) -> Result:
    return run_steps(model_engine, batch_of, steps, first)


def finish(model_engine: engine.Engine, result: Result) -> Result:
    result.parameters = {name: value.float().cpu() for name, value in model_engine.full_parameters().items()}
    model_engine.destroy()
    return result


def in_one_process(steps: int, make_optimizer: Any, clip: float = 0.0, num_parts: int = 1) -> Result:
    """The whole model in plain PyTorch."""
    model = seeded(Gated)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    result = Result()
    for step in range(steps):
        losses = []
        for index in range(num_parts):
            loss = model(**part(batch_of(step), index, num_parts))
            (loss / num_parts).backward()
            losses.append(loss.item())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.cat([g.double().flatten() for g in gradients]).norm().item()
        if clip:
            for gradient in gradients:
                gradient.mul_(min(1.0, clip / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(sum(losses) / num_parts)
        result.norms.append(norm)
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result
