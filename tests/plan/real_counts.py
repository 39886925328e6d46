"""What a rank holds and sends in a real step, and what the plan says of it, on the toy GPT or a model of odd shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.model.describe import describe_model
from engine.plan import World, plan
from engine.plan.forecast import forecast
from engine.plan.states import states_by_rank
from tests.parity.toy import part, toy_batch, toy_model

STEPS, MICRO_BATCH, LENGTH = 2, 2, 32
STATES = ("parameters", "masters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True)
class Counts:
    """Of one rank. ``states``: bytes of each of `STATES`. ``calls``: (axis, operation) -> calls and bytes sent, of one
    step. ``activations``: bytes that a forward keeps for its backward; None where nobody measured."""

    states: dict[str, int]
    calls: dict[tuple[str, str], tuple[int, int]]
    activations: int | None = None


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


def planned(world: int, config: dict[str, Any], kind: str = "toy") -> list[Counts]:
    """Of every rank, without any."""
    made = plan(load_config(config), World(world, world))
    facts = describe_model(Odd if kind == "odd" else toy_model, made, None if kind == "odd" else _toy_loss, LENGTH)
    calls: dict[tuple[str, str], tuple[int, int]] = {}
    first = forecast(made, facts).ranks[0]
    for call in first.in_one_bit or first.collectives:
        before, sent = calls.get((call.axis, call.operation), (0, 0))
        calls[call.axis, call.operation] = (before + call.calls, sent + call.sent_bytes)
    kept = first.activations
    by_rank = states_by_rank(made, facts)
    states = [by_rank[rank // made.degrees.tp % len(by_rank)] for rank in range(world)]
    return [
        Counts({name: getattr(one, name) for name in STATES}, calls, kept.kept if kept is not None else None)
        for one in states
    ]


def _toy_loss(model: nn.Module) -> Tensor:
    return model(**toy_batch(0, MICRO_BATCH))


def counted(config: dict[str, Any], kind: str = "toy") -> Counts:
    """On every rank: what it holds after a step, gradients in it, and what the ledger counted in the one before."""
    model = Odd() if kind == "odd" else toy_model()
    model_engine, *_ = engine.initialize(model=model, config=config)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dp, index = model_engine.mesh.dp_size, model_engine.mesh.dp_rank

    def backward(step: int) -> int:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(MICRO_BATCH * world, 7, generator=generator)
        with Kept(model_engine.module) as kept:
            if kind == "odd":
                loss = model_engine(inputs[MICRO_BATCH * rank : MICRO_BATCH * (rank + 1)])
            else:
                loss = model_engine(**part(toy_batch(step, MICRO_BATCH * dp), index, dp))
        activations = kept.num_bytes
        kept.release()
        model_engine.backward(loss)
        return activations

    calls: dict[tuple[str, str], tuple[int, int]] = {}
    for step in range(STEPS):
        before = model_engine.ledger.sent()
        for _ in range(config["gradient_accumulation_steps"]):
            backward(step)
            model_engine.step()
        for key, after in model_engine.ledger.sent().items():
            was = before.get(key)
            calls[key] = (after.calls - was.calls, after.bytes - was.bytes) if was else (after.calls, after.bytes)
    for _ in range(config["gradient_accumulation_steps"]):
        activations = backward(STEPS)
    reduction = model_engine.roles.reduction
    reduction.finish()
    states = states_held(model_engine, reduction)
    model_engine.destroy()
    return Counts(states, {key: counts for key, counts in calls.items() if counts[0]}, activations)


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes of the storages that autograd keeps, without those of parameters, gathered ones included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._own: dict[int, torch.UntypedStorage] = {}
        self._hooks = [module.register_forward_pre_hook(self._note_own) for module in model.modules()]

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _note_own(self, module: nn.Module, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            storage = local.untyped_storage()
            self._own[storage._cdata] = storage

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for key, storage in self._storages.items() if key not in self._own)

    def release(self) -> None:
        self._storages.clear()
        self._own.clear()
        for hook in self._hooks:
            hook.remove()


def held_bytes(tensors: list[Tensor | None]) -> int:
    """Bytes of the storages behind ``tensors``, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def states_held(model_engine: Any, reduction: Any) -> dict[str, int]:
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
    """A config whose buckets and groups are small, so that there are several."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 20_000}
    if stage == 3:
        zero = {"stage": 3, "stage3_prefetch_bucket_size": 60_000}
    zero |= more.pop("zero_optimization", {})
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **more,
    }


TP, SP, CP = {"tensor_parallel": {"size": 2}}, {"sequence_parallel_size": 2}, {"parallel": {"context_parallel": 2}}
HSDP = {"zero_optimization": {"mics_shard_size": 2}}
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    f"dp {world}, stage {stage}": (world, settings(stage)) for world in (1, 2, 4, 8) for stage in range(4)
}
ROWS |= {
    f"{name}, stage {stage}": (world, settings(stage, **more))
    for name, world, stages, more in (
        ("tp 2", 2, (0,), TP),
        ("sp 2", 2, (0, 3), SP),
        ("cp 2", 2, (0, 3), CP),
        ("tp 4", 4, (1,), {"tensor_parallel": {"size": 4}}),
        ("dp 2 x tp 2", 4, (0, 1, 2, 3), TP),
        ("dp 2 x sp 2", 4, (1, 2), SP),
        ("dp 2 x cp 2", 4, (1, 2), CP),
        ("sp 2 x cp 2", 4, (3,), SP | CP),
        ("dp 4 x tp 2", 8, (0, 1, 2), TP),
        ("HSDP 2 x 2 x tp 2", 8, (3,), TP | HSDP),
        ("dp 2 x sp 2 x tp 2", 8, (1,), TP | SP),
        ("dp 2 x cp 2 x tp 2", 8, (2,), TP | CP),
    )
    for stage in stages
}
"""Name -> ranks and config."""
ONE_BIT: dict[str, tuple[int, dict[str, Any]]] = {
    f"{name}, dp {dp}{' x tp 2' if more else ''}, {params or 'buckets'}": (
        dp * (2 if more else 1),
        settings(0, 1, optimizer={"type": name, "params": {"lr": 0.1, switch: 1, **params}}, **more),
    )
    for name, switch, dp, params, more in (
        ("OneBitAdam", "freeze_step", 2, {}, {}),
        ("OneBitAdam", "freeze_step", 3, {"compression_unit": "tensor"}, {}),
        ("OneBitAdam", "freeze_step", 4, {"compression_unit": "group"}, {}),
        ("OneBitAdam", "freeze_step", 3, {"compat": "deepspeed"}, {}),
        ("OneBitAdam", "freeze_step", 2, {"compression_unit": "tensor"}, TP),
        ("ZeroOneAdam", "var_freeze_step", 2, {"local_step_scaler": 1_000}, {}),
        ("OneBitLamb", "freeze_step", 2, {"compression_unit": "tensor"}, {}),
    )
}
"""The second step, which is the one that is counted, sends signs."""
