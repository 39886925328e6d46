"""The rows of the table: for each engine how it is imported and how it trains one optimizer step.

A row's ``setup`` gets the model and returns a function that trains one step on its micro-batches and returns their mean
loss on this rank. It leaves the process group initialised. Libraries are imported inside, since a row runs in an
interpreter that may have nothing but torch and its own library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.bench.workload import GPT, Workload

Step = Callable[[Iterable[tuple[Tensor, Tensor]]], float]


@dataclass(frozen=True)
class Row:
    """``load`` imports the row's own library; its memory counts as imports and not as training."""

    setup: Callable[[GPT, Workload], Step]
    load: Callable[[], None] = lambda: None
    needs_deepspeed: bool = False


def join() -> None:
    """The process group, once: rows that run in turn share it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def plain_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    deferred: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Step:
    """The loop that a user writes by hand; ``deferred`` is entered around every backward but the last."""

    def step(micro_batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for index, (tokens, targets) in enumerate(micro_batches, start=1):
            with contextlib.nullcontext() if index == workload.accumulation_steps else deferred():
                loss = module(tokens, targets) / workload.accumulation_steps
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), workload.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def setup_ddp(model: GPT, workload: Workload) -> Step:
    join()
    module = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **workload.adamw_arguments)
    return plain_step(module, optimizer, workload, module.no_sync)


def setup_zero_redundancy(model: GPT, workload: Workload) -> Step:
    join()
    module = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.AdamW, fused=True, **workload.adamw_arguments
    )
    return plain_step(module, optimizer, workload, module.no_sync)


def setup_fsdp2(model: GPT, workload: Workload, *, reshard_after_forward: bool) -> Step:
    join()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    module = fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **workload.adamw_arguments)

    @contextlib.contextmanager
    def deferred() -> Any:
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)

    return plain_step(model, optimizer, workload, deferred)


def json_config(workload: Workload, stage: int) -> dict[str, Any]:
    """The same run as a config in DeepSpeed's format."""
    return {
        "train_micro_batch_size_per_gpu": workload.micro_batch_size,
        "gradient_accumulation_steps": workload.accumulation_steps,
        "gradient_clipping": workload.clip,
        "optimizer": {"type": "AdamW", "params": {**workload.adamw_arguments, "betas": list(workload.betas)}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1_000_000,
    }


def engine_step(model_engine: Any) -> Step:
    """The loop of an engine with DeepSpeed's interface."""

    def step(micro_batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        losses = []
        for tokens, targets in micro_batches:
            loss = model_engine(tokens, targets)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    return step


def initialize() -> Callable[..., Any]:
    """This engine's entry. Public names are loaded when they are first asked for."""
    import engine

    entry: Callable[..., Any] = engine.initialize
    return entry


def load_engine() -> None:
    initialize()


def setup_engine(model: GPT, workload: Workload, *, stage: int) -> Step:
    return engine_step(initialize()(model=model, config=json_config(workload, stage))[0])


def setup_by_hand(model: GPT, workload: Workload, *, stage: int) -> Step:
    """The engine's mechanism of a stage without its Engine: a loop written on `engine.model.zero` itself."""
    from engine.collectives.ledger import Ledger
    from engine.collectives.shards import ShardGroup
    from engine.config import load_config
    from engine.mesh import Mesh
    from engine.model import zero
    from engine.model.blocks import find_blocks
    from engine.parameters import ParameterRegistry
    from engine.plan import World, plan

    join()
    world = dist.get_world_size()
    resolved = plan(load_config(json_config(workload, stage)), World(world, world))
    mesh, ledger, blocks = Mesh(resolved.degrees, torch.device("cpu")), Ledger(), find_blocks(model)
    registry = ParameterRegistry(model, None, blocks)
    reduction = zero.apply(model, registry, [blocks], resolved, mesh, ledger, "elementwise").reduction
    ranks = ShardGroup.of(mesh, "world", ledger)
    masters = [shard.parameter for shard in reduction.shards]
    optimizer = torch.optim.AdamW(masters, fused=True, **workload.adamw_arguments)

    def step(micro_batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for index, (tokens, targets) in enumerate(micro_batches, start=1):
            loss = model(tokens, targets) / workload.accumulation_steps
            reduction.begin_backward(last=index == workload.accumulation_steps)
            loss.backward()
            reduction.end_backward()
            total += loss.item()
        reduction.finish()
        norm = ranks.sum(reduction.sum_of_squares()).sqrt().item() / reduction.divisor
        factor = min(1.0, workload.clip / (norm + 1e-6)) / reduction.divisor
        optimizer.grad_scale = torch.tensor(1.0 / factor)  # type: ignore[attr-defined]
        optimizer.step()
        reduction.publish()
        reduction.zero_gradients()
        return total

    return step


def load_deepspeed() -> None:
    import logging

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)


def setup_deepspeed(model: GPT, workload: Workload, *, stage: int) -> Step:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = json_config(workload, stage)
    return engine_step(deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0])


STAGES = range(4)
ROWS: dict[str, Row] = {
    "ddp": Row(setup_ddp),
    "zero-redundancy": Row(setup_zero_redundancy),
    "fsdp2-s2": Row(partial(setup_fsdp2, reshard_after_forward=False)),
    "fsdp2-s3": Row(partial(setup_fsdp2, reshard_after_forward=True)),
    **{
        f"deepspeed-s{stage}": Row(partial(setup_deepspeed, stage=stage), load_deepspeed, needs_deepspeed=True)
        for stage in STAGES
    },
    **{f"engine-s{stage}": Row(partial(setup_engine, stage=stage), load_engine) for stage in STAGES},
    **{f"hand-s{stage}": Row(partial(setup_by_hand, stage=stage), load_engine) for stage in STAGES},
}
BASE = "ddp"
"""The row that ratios refer to."""
