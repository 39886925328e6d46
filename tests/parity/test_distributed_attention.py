"""`DistributedAttention`, DeepSpeed's module, on slices against attention over whole sequences on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.compat.sequence.layer import DistributedAttention
from tests.parity.small import seeded

BATCH, LENGTH, HEADS, WIDTH = 3, 8, 4, 6


def attention_of(layout: str) -> Any:
    """Causal attention of tensors whose dimensions are in the order of ``layout``."""

    def local(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Tensor:
        order = [layout.index(letter) for letter in "bhsd"]
        mixed = F.scaled_dot_product_attention(
            *(tensor.permute(order) for tensor in (query, key, value)), is_causal=is_causal, enable_gqa=True
        )
        return mixed.permute(["bhsd".index(letter) for letter in layout])

    return local


def whole_tensors(layout: str, groups: int) -> list[Tensor]:
    sizes = {"b": BATCH, "s": LENGTH, "d": WIDTH}
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, groups, groups, HEADS)  # the last is the gradient of the output
    return [torch.randn([{**sizes, "h": h}[letter] for letter in layout], generator=generator) for h in heads]


def turned(tensor: Tensor, layout: str, angles: Tensor) -> Tensor:
    """Rotary positions by complex numbers, of a tensor in ``layout``."""
    along_sequence = tensor.movedim(layout.index("s"), -2)
    half = angles.shape[-1]
    numbers = torch.complex(along_sequence[..., :half], along_sequence[..., half : 2 * half]) * torch.exp(1j * angles)
    parts = (numbers.real, numbers.imag, along_sequence[..., 2 * half :])
    return torch.cat(parts, dim=-1).movedim(-2, layout.index("s"))


def on_slices(layout: str, groups: int, is_turned: bool) -> tuple[list[Tensor], int]:
    """Output and gradients of this rank's slice, and the bytes that it sent."""
    rank, size, along = dist.get_rank(), dist.get_world_size(), layout.index("s")
    tensors = [t.chunk(size, along)[rank].clone() for t in whole_tensors(layout, groups)]
    inputs = [t.requires_grad_() for t in tensors[:3]]
    attention = DistributedAttention(attention_of(layout), dist.group.WORLD, layout.index("h"), along)
    angles = torch.arange(LENGTH)[:, None] / torch.tensor([1.0, 10.0])
    rotary = tuple(f(torch.cat((angles, angles), -1))[None, :, None] for f in (torch.cos, torch.sin))
    output = attention(*inputs, layout.index("b"), rotary if is_turned else None, is_causal=True)
    output.backward(tensors[3])
    return [output.detach(), *(t.grad for t in inputs)], attention.ledger.take()["sp"]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layout", "groups", "is_turned"), [("bshd", 4, False), ("sbhd", 4, True), ("bshd", 4, True)])
def test_slices_give_what_whole_sequences_give(ranks, world, layout, groups, is_turned):
    *inputs, gradient = whole_tensors(layout, groups)
    inputs = [t.requires_grad_() for t in inputs]
    query, key, value = inputs
    if is_turned:
        angles = torch.arange(LENGTH)[:, None] / torch.tensor([1.0, 10.0])
        query, key = (turned(t, layout, angles) for t in (query, key))
    output = attention_of(layout)(query, key, value)
    output.backward(gradient)
    by_rank = ranks(world).run(on_slices, layout, groups, is_turned, timeout=240)
    for index, expected in enumerate((output.detach(), *(t.grad for t in inputs))):
        found = torch.cat([tensors[index] for tensors, _ in by_rank], layout.index("s"))
        assert (found - expected).abs().max() <= 1e-5
    head = 4 * WIDTH * BATCH * (LENGTH // world)  # bytes of one head of a slice
    assert {sent for _, sent in by_rank} == {2 * (2 * HEADS + 2 * groups) * head * (world - 1) // world}


def test_grouped_heads(ranks):
    test_slices_give_what_whole_sequences_give(ranks, 2, "bshd", 2, False)


class Attending(nn.Module):
    """What a user of `DistributedAttention` writes: heads and width in one, each rank's tokens alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 5)
        self.attend = DistributedAttention(self.local, group, scatter_idx=2, gather_idx=1)

    def local(self, *tensors: Tensor) -> Tensor:
        query, key, value = (t.unflatten(-1, (-1, WIDTH)) for t in tensors)
        return attention_of("bshd")(query, key, value).flatten(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.attend(*self.into(x).chunk(3, dim=-1), 0)), y)


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {key: torch.randn(BATCH, LENGTH, 5, generator=generator) for key in "xy"}


def train(stage: int) -> tuple[list[float], dict[str, Tensor]]:
    """The ranks that share sequences are data-parallel ones to the engine."""
    engine.init_distributed()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = seeded(lambda: Attending(dist.group.WORLD if world > 1 else None))
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
    }
    model_engine, *_ = engine.initialize(model=model, config=config)
    losses = []
    for step in range(3):
        own = {key: value.chunk(world, 1)[rank] for key, value in batch_of(step).items()}
        model_engine.backward(model_engine(**own))
        model_engine.step()
        losses.append(model_engine.last_report.loss)
    parameters = {name: value.clone() for name, value in model_engine.full_parameters().items()}
    model_engine.destroy()
    return losses, parameters


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_cuts_its_sequences_trains_as_one_process_does(ranks, stage):
    ((losses, parameters),) = ranks(1).run(train, stage, timeout=240)
    for found, whole in ranks(2).run(train, stage, timeout=240):
        assert found == pytest.approx(losses, abs=1e-5)
        for name, value in parameters.items():
            assert (whole[name] - value).abs().max() <= 1e-5, name


def refusals() -> dict[str, str]:
    tensors = [torch.zeros(2, 4, 3, 6) for _ in range(3)]
    cases = {
        "heads": ((2, 1), tensors, 0),
        "batch": ((3, 0), tensors, 0),
        "dimensions": ((1, 0), [t.flatten(1) for t in tensors], 0),
    }
    found = {}
    for name, (indices, inputs, batch) in cases.items():
        try:
            DistributedAttention(attention_of("bshd"), dist.group.WORLD, *indices)(*inputs, batch)
        except engine.EngineError as error:
            found[name] = str(error)
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    try:
        engine.initialize(model=TakesPositions(dist.group.WORLD), config=config)
    except engine.EngineError as error:
        found["twice"] = str(error)
    return found


class TakesPositions(Attending):
    def forward(self, x: Tensor, y: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(x, y)


def test_refused_by_name(ranks):
    first, second = ranks(2).run(refusals, timeout=240)
    assert first == second
    assert "query of shape (2, 4, 3, 6): 2 ranks cannot share the 3 attention heads: 3 = 1 x 2 + 1" in first["heads"]
    assert "scatter_idx 3, gather_idx 0 and batch_dim_idx 0 must be three dimensions of 4" in first["batch"]
    assert "query has shape (2, 72); 3 or 4 dimensions go" in first["dimensions"]
    assert "attend (DistributedAttention) exchanges heads by itself" in first["twice"]


def test_under_the_names_that_scripts_use() -> None:
    assert engine.sequence.layer.DistributedAttention is DistributedAttention
