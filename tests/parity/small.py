"""Small models of awkward shapes, the plain loop they are compared with, and the same loop in the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import engine
from tests.parity.runs import Pieces, pieces_of, run_steps
from tests.parity.toy import Result, part, toy_batch, toy_model

GLOBAL_BATCH = 12
VOCABULARY_SIZE = 101
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.1}


class Regression(nn.Module, ABC):
    """Everything here predicts ``y`` (4 features) from ``x`` (8 features) and returns the mean squared error."""

    @abstractmethod
    def predict(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.predict(x), y)


class Layers(Regression):
    """No repeated blocks: layers of different kinds and sizes in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 7, bias=False), nn.LayerNorm(7), nn.Linear(7, 4)
        )

    def predict(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tiny(Regression):
    """A 0-dim parameter, one of a single element, and one of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.pair = nn.Parameter(torch.ones(2))

    def predict(self, x: Tensor) -> Tensor:
        return self.last(self.scale * self.first(x) + self.shift) * self.pair.repeat(2)


class Unused(Regression):
    """``never`` takes no part; ``rarely`` only where the first feature of the micro-batch's first sample is high."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)
        self.rarely, self.never = nn.Linear(6, 6), nn.Linear(6, 6)

    def predict(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if x[0, 0] > RARE:
            hidden = hidden + self.rarely(hidden)
        return self.last(hidden)


class Normalised(Regression):
    """Batch normalisation: buffers of two dtypes that forward writes; and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.offset: Tensor
        self.register_buffer("offset", torch.linspace(-1, 1, 4), persistent=False)

    def predict(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()) + self.offset


class Repeated(Regression):
    """Blocks that share: the first and the last block are one module, and all use one bias."""

    def __init__(self) -> None:
        super().__init__()
        block, middle = nn.Linear(8, 8), nn.Linear(8, 8)
        middle.bias = block.bias
        self.blocks = nn.ModuleList([block, middle, block])
        self.last = nn.Linear(8, 4)

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


class Bridged(Regression):
    """A parameter of a block that the output layer uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.blocks[1].weight

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)[:, :4]


class Odd(Regression):
    """What is laid out or differentiated unlike the rest: a transposed weight, a channels-last one, sparse gradients,
    an empty parameter, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 8).t())
        self.convolution = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.embedding = nn.Embedding(5, 4, sparse=True)
        self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
        self.integers = nn.Parameter(torch.arange(4), requires_grad=False)

    def predict(self, x: Tensor) -> Tensor:
        image = self.convolution(x.view(-1, 1, 2, 4)).mean(dim=(1, 2, 3))
        buckets = x[:, 1].abs().long().clamp(max=4)
        return x @ self.turned + image[:, None] + self.embedding(buckets) + self.integers + self.empty.sum()


RARE = 1.2


def regression_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2000 + step)
    x = torch.randn(GLOBAL_BATCH, 8, generator=generator)
    x[:, 0].clamp_(max=1.0)
    x[0, 0] = 2.0 * RARE  # the first sample, and with it one micro-batch of one rank, uses what is rarely used
    return {"x": x, "y": torch.randn(GLOBAL_BATCH, 4, generator=generator)}


def token_batch(step: int) -> dict[str, Tensor]:
    return toy_batch(step, GLOBAL_BATCH, VOCABULARY_SIZE)


def gpt(**changes: Any) -> nn.Module:
    return toy_model(vocabulary_size=VOCABULARY_SIZE, **{"num_blocks": 2, "width": 16, "num_heads": 2, **changes})


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


@dataclass(frozen=True)
class Case:
    """``frozen``: beginnings of the names of parameters that do not train. ``groups``: parameter groups of the model,
    each with its own options."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]] = regression_batch
    frozen: tuple[str, ...] = ()
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    zero: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        model = seeded(self.make)
        for name, parameter in model.named_parameters():
            if self.frozen and name.startswith(self.frozen):
                parameter.requires_grad_(False)
        return model


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "lr": 3e-3, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]


CASES = {
    "tied": Case(gpt, token_batch),
    "untied": Case(lambda: gpt(tie_embeddings=False), token_batch),
    "frozen": Case(lambda: gpt(tie_embeddings=False), token_batch, frozen=("blocks.0.", "position_embedding")),
    "one block": Case(lambda: gpt(num_blocks=1), token_batch),
    "blocks gathered one by one": Case(gpt, token_batch, zero={"prefetch_bucket_size": 1}),
    "many small buckets": Case(gpt, token_batch, zero={"reduce_bucket_size": 1}),
    "no blocks": Case(Layers),
    "tiny parameters": Case(Tiny),
    "unused": Case(Unused),
    "buffers": Case(Normalised),
    "odd": Case(Odd),
    "groups": Case(Layers, groups=two_groups),
    "repeated blocks": Case(Repeated, zero={"prefetch_bucket_size": 1}),
    "bridged blocks": Case(Bridged, zero={"prefetch_bucket_size": 1}),
}


def config_of(stage: int, accumulation: int, case: Case | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **(case.zero if case is not None else {})},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "seed": 0,
        **more,
    }


def plain_loop(case: Case, num_parts: int, steps: int, make_optimizer: Callable[[Iterable[Any]], Any]) -> Result:
    """One process, no engine: gradients are averaged over ``num_parts`` micro-batches."""
    model = case.model()
    groups = case.groups(model) if case.groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(groups)
    result = Result()
    for step in range(steps):
        losses = []
        for index in range(num_parts):
            loss = model(**part(case.batch(step), index, num_parts))
            (loss / num_parts).backward()
            losses.append(loss.item())
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(sum(losses) / num_parts)
        result.norms.append(torch.cat(gradients).norm().item())
    result.parameters = {name: p.detach().float() for name, p in model.named_parameters() if p.numel()}
    return result


def run_case(case: Case, config: dict[str, Any], steps: int) -> tuple[Result, Pieces, dict[str, Any]]:
    """The same in the engine, on every rank. The facts: names with optimizer state, and buffers."""
    model = case.model()
    groups = case.groups(model) if case.groups else None
    model_engine, *_ = engine.initialize(model=model, config=config, model_parameters=groups)
    result = run_steps(model_engine, case.batch, steps)
    assert model_engine.optimizer is not None
    facts = {
        "state": sorted(model_engine.optimizer.named_state()),
        "buffers": {name: buffer.clone() for name, buffer in model_engine.module.named_buffers()},
    }
    pieces = pieces_of(model_engine)
    model_engine.destroy()
    return result, pieces, facts
