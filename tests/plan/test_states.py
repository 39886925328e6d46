"""Bytes of model states and collectives per step: the plan against the tensors and the ledger of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.model.describe import describe_model
from engine.plan import World, plan
from engine.plan.collectives import count_collectives
from engine.plan.states import states_by_rank
from tests.parity.toy import part, toy_batch, toy_model

STEPS = 2


class Odd(nn.Module):
    """Uneven rows, a 0-dim parameter, a frozen matrix, a tied pair of blocks beside two that stand alone, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.eye(7), requires_grad=False)
        self.register_buffer("offset", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return ((x @ self.frozen + self.offset) * self.scale).square().mean()


def held_bytes(tensors: list[Tensor | None]) -> int:
    """Bytes of the storages behind ``tensors``, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def count_real(config: dict[str, Any], kind: str) -> tuple[dict[str, int], dict[tuple[str, str], tuple[int, int]]]:
    """What this rank holds after a step, gradients in it, and what the ledger counted in the one before."""
    model = Odd() if kind == "odd" else toy_model()
    model_engine, *_ = engine.initialize(model=model, config=config)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def backward(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(2 * world, 7, generator=generator)
        if kind == "odd":
            loss = model_engine(inputs[2 * rank : 2 * rank + 2])
        else:
            dp, index = model_engine.mesh.dp_size, model_engine.mesh.dp_rank
            loss = model_engine(**part(toy_batch(step, 2 * dp), index, dp))
        model_engine.backward(loss)

    sent: dict[tuple[str, str], tuple[int, int]] = {}
    for step in range(STEPS):
        before = model_engine.ledger.sent()
        for _ in range(config["gradient_accumulation_steps"]):
            backward(step)
            model_engine.step()
        none = type(next(iter(before.values())))() if before else None
        for key, after in model_engine.ledger.sent().items():
            was = before.get(key, none)
            sent[key] = (after.calls - was.calls, after.bytes - was.bytes) if was else (after.calls, after.bytes)
    for _ in range(config["gradient_accumulation_steps"]):
        backward(STEPS)
    reduction = model_engine.roles.reduction
    reduction.finish()
    return _held(model_engine, reduction), {key: counted for key, counted in sent.items() if counted[0]}


def _held(model_engine: Any, reduction: Any) -> dict[str, int]:
    parts = getattr(reduction, "_parts", (reduction,))
    buckets = [bucket for part in parts for bucket in getattr(part, "buckets", ())]
    parameters = [p.data for p in model_engine.module.parameters()]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    gradients = [p.grad for p in model_engine.module.parameters() if p.grad is not None]
    gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    masters = [
        b.master for b in buckets if b.master.untyped_storage().data_ptr() != b.values.untyped_storage().data_ptr()
    ]
    optimizer = [v for state in model_engine.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return {
        "parameters": held_bytes([*local, *(b.values for b in buckets)]),
        "masters": held_bytes(masters),
        "gradients": held_bytes([*gradients, *(b.home for b in buckets)]),
        "optimizer": sum(v.nbytes for v in optimizer),
        "buffers": sum(b.nbytes for b in model_engine.module.buffers()),
    }


def settings(stage: int, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 20_000}
    if stage == 3:
        zero = {"stage": 3, "stage3_prefetch_bucket_size": 60_000}
    zero |= more.pop("zero_optimization", {})
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **more,
    }


def toy_loss(model: nn.Module) -> Tensor:
    return model(**toy_batch(0, 2))


def compare(ranks: Any, world: int, config: dict[str, Any], kind: str = "toy") -> None:
    made = plan(load_config(config), World(world, world))
    facts = describe_model(Odd if kind == "odd" else toy_model, made, None if kind == "odd" else toy_loss, 32)
    by_rank = states_by_rank(made, facts)
    expected: dict[tuple[str, str], tuple[int, int]] = {}
    for call in count_collectives(made, facts):
        calls, sent = expected.get((call.axis, call.operation), (0, 0))
        expected[call.axis, call.operation] = (calls + call.calls, sent + call.sent_bytes)
    for rank, (held, sent) in enumerate(ranks(world).run(count_real, config, kind)):
        planned = by_rank[rank // made.degrees.tp % len(by_rank)]
        assert held["parameters"]
        assert held["gradients"]
        assert held == {name: getattr(planned, name) for name in held}
        assert sent == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_toy(ranks: Any, world: int, stage: int) -> None:
    compare(ranks, world, settings(stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_toy_on_eight_ranks(ranks: Any, stage: int) -> None:
    compare(ranks, 8, settings(stage, accumulation=1))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bit_with_gradients_in_16_bit(ranks: Any, stage: int) -> None:
    bf16 = {"bf16": {"enabled": True}}
    compare(ranks, 2, settings(stage, **bf16))
    compare(ranks, 2, settings(stage, **bf16, data_types={"grad_accum_dtype": "bf16"}))
    compare(ranks, 2, settings(stage, **bf16, communication_data_type="bf16"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ties_frozen_and_0_dim_parameters(ranks: Any, stage: int) -> None:
    compare(ranks, 3, settings(stage, zero_optimization={} if stage < 3 else {"stage3_prefetch_bucket_size": 1}), "odd")


@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}])
def test_groups_of_ranks(ranks: Any, zero: dict[str, int]) -> None:
    compare(ranks, 4, settings(3, zero_optimization=zero))


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        ("Lamb", {}),
        ("SGD", {"momentum": 0.9}),
        ("NAdam", {}),
        ("Adagrad", {}),
        ("RMSprop", {"centered": True}),
        ("Lion", {}),
    ],
)
def test_optimizers(ranks: Any, optimizer: str, params: dict[str, Any]) -> None:
    compare(ranks, 2, settings(2, optimizer={"type": optimizer, "params": {"lr": 1e-3, **params}}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_parallel_ranks_beside_every_stage(ranks: Any, stage: int) -> None:
    compare(ranks, 4, settings(stage, tensor_parallel={"size": 2}))


def test_tensor_parallel_ranks_alone(ranks: Any) -> None:
    compare(ranks, 2, settings(0, tensor_parallel={"size": 2}, bf16={"enabled": True}))
