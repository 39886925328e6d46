"""ZeRO: `apply` makes the model data-parallel as the plan's stage says and returns the `Reduction` role.

First file to read: buckets.py (stages 0 to 2), then fully_sharded.py (stage 3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.config.messages import EngineError
from engine.mesh import Mesh
from engine.model.materialise import Materialiser
from engine.model.zero.buckets import BucketReduction
from engine.model.zero.fully_sharded import FullyShardedReduction, row_shards, shard_model
from engine.model.zero.layout import DTYPES, HALF, Granularity, build_buckets, compute_dtype, master_dtype
from engine.model.zero.scalars import ShardedWithScalars
from engine.model.zero.shards import ParameterShard
from engine.model.zero.whole_parameters import OwnedParametersReduction
from engine.parameters import ParameterRegistry
from engine.plan import Plan, PrecisionPlan
from engine.plan.cuts import is_cut

log = logging.getLogger("engine")

__all__ = ["DTYPES", "Granularity", "ParameterShard", "Zero", "apply", "autocast"]


@dataclass(frozen=True)
class Zero:
    """The role, and this rank's shards of the parameters that it does not train.

    ``writes_shards``: whether this rank saves them, as one of those that hold the same.
    """

    reduction: BucketReduction | FullyShardedReduction | ShardedWithScalars
    frozen: Sequence[ParameterShard]
    writes_shards: bool


def apply(
    model: nn.Module,
    registry: ParameterRegistry,
    runs: Sequence[Sequence[nn.Module]],
    plan: Plan,
    mesh: Mesh,
    ledger: Ledger,
    granularity: Granularity,
) -> Zero:
    """Fill, place, cast and shard ``model`` in place. On one data-parallel rank every stage is the same thing.

    ``runs``: the repeated blocks, those of each pipeline stage on this rank apart. Under a pipeline gradients are
    reduced once in a window, whatever the stage.
    """
    note_own_statistics(model, mesh)
    shard_group = ShardGroup.of(mesh, "dp_shard", ledger)
    replicate_group = ShardGroup.of(mesh, "dp_replicate", ledger)
    tensor_group = ShardGroup.alone() if mesh.split_by_caller else ShardGroup.of(mesh, "tp", ledger)

    def broadcast(tensor: Tensor) -> None:
        replicate_group.broadcast(tensor)
        shard_group.broadcast(tensor)

    if granularity == "flat" and plan.zero.stage > 0:
        raise EngineError(
            f"a 1-bit optimizer cannot train at stage {plan.zero.stage}: every rank needs the whole variance and its "
            "own errors to apply a momentum that travelled as signs; set zero_optimization.stage to 0"
        )
    first_replica, pipelined = replicate_group.rank == 0, plan.pipeline is not None
    sharded = plan.zero.stage == 3 and shard_group.size > 1
    dtype_of = master_dtype if sharded else lambda dtype: dtype
    num_meta = float(sum(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())))
    sums = torch.tensor([num_meta, num_meta**2], dtype=torch.float64, device=mesh.device)
    blocks = [block for run in runs for block in run]
    tensor_group.sum(replicate_group.sum(shard_group.sum(sums)))
    num_ranks = mesh.token_size * tensor_group.size
    same_everywhere = bool(sums[0] ** 2 == sums[1] * num_ranks)  # no rank differs from another
    materialise = Materialiser(
        model,
        registry,
        blocks,
        mesh.device,
        plan.seed,
        broadcast,
        dtype_of,
        same_everywhere,
        broadcast_whole=tensor_group.broadcast,
    )
    managed = [info for info in registry.held() if info.group is not None]
    indices = {info.index for info in managed}
    if sharded:
        precision = _uniform(registry, plan.precision)
        stage_3 = replace(plan.zero, reshard_after_forward=False) if pipelined else plan.zero
        shard_model(model, runs, stage_3, precision, mesh, shard_group, replicate_group, materialise)
        registry.refresh(model)
        cast_buffers(model, plan.precision)
        kind = OwnedParametersReduction if granularity == "whole" else FullyShardedReduction
        rows = [info for info in managed if is_cut(info.shape)]
        sharding = kind(model, registry, rows, plan.zero, mesh, shard_group, whole_windows=pipelined)
        scalars = [
            (info, parameter) for info, parameter in registry.parameters() if info.index in indices and not info.shape
        ]
        for info, parameter in registry.parameters():
            if not info.shape and info.index not in indices:
                parameter.data = parameter.data.to(compute_dtype(info.dtype, precision))
        frozen_rows = row_shards(model, registry, mesh, indices)
        if not scalars:
            return Zero(sharding, frozen_rows, first_replica)
        whole = replace(plan.zero, stage=1, bucket_elements=len(scalars))
        buckets = build_buckets(
            scalars,
            whole,
            precision,
            "elementwise",
            shard_group,
            replicate_group,
            mesh.dp_size,
            registry.shared(),
        )
        return Zero(ShardedWithScalars(sharding, buckets), frozen_rows, first_replica)

    if tensor_group.size > 1:
        for block in blocks:  # one after the other, for each is whole before it is cut
            materialise([block])
    materialise([model])
    trained, frozen = [], []
    for info, parameter in registry.parameters():
        if info.index in indices:
            trained.append((info, parameter))
            continue
        parameter.data = parameter.data.to(compute_dtype(parameter.dtype, plan.precision))
        frozen.append(ParameterShard(info, parameter, 0, info.numel, on_every_rank=True))
    cast_buffers(model, plan.precision)
    zero = replace(plan.zero, stage=min(plan.zero.stage, 1)) if pipelined else plan.zero
    reduction = build_buckets(
        trained,
        zero,
        plan.precision,
        granularity,
        shard_group,
        replicate_group,
        mesh.dp_size,
        registry.shared(),
    )
    return Zero(reduction, frozen, first_replica)


def note_own_statistics(model: nn.Module, mesh: Mesh) -> None:
    """Batch normalisation sees a rank's micro-batch alone; nothing makes the running statistics equal again."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    own = [name for name, module in model.named_modules() if isinstance(module, kinds) and module.track_running_stats]
    if own and mesh.dp_size > 1 and mesh.rank == 0:
        log.warning(
            "%s (%d in all): each rank keeps batch statistics of its own, and checkpoints hold rank 0's; "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before initialize() shares them on accelerators",
            own[0],
            len(own),
        )


@torch.no_grad()
def cast_buffers(model: nn.Module, precision: PrecisionPlan) -> None:
    """Buffers keep their dtype unless ``data_types.buffer_dtype`` says otherwise."""
    if precision.buffers is None:
        return
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, key, buffer.to(DTYPES[precision.buffers]))


def autocast(precision: PrecisionPlan, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What every forward runs in: ``torch_autocast`` where it is on."""
    if precision.autocast is None:
        return nullcontext
    dtype = DTYPES[precision.autocast]
    return lambda: torch.autocast(device.type, dtype)


def _uniform(registry: ParameterRegistry, precision: PrecisionPlan) -> PrecisionPlan:
    """Stage 3 with a model that is 16-bit already: forward stays in its dtype, the shards are fp32 masters.

    Raises EngineError for a model of several dtypes, which FSDP2 cannot gather together.
    """
    dtypes = {info.dtype for info in registry.infos if info.dtype.is_floating_point}
    if precision.compute != "fp32":
        dtypes = {master_dtype(dtype) for dtype in dtypes}
    if len(dtypes) > 1:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise EngineError(
            f"zero_optimization.stage 3: the model has parameters in {found}; it needs one dtype. "
            "Convert the model to one, or use stage 0, 1 or 2"
        )
    if precision.compute != "fp32" or dtypes.isdisjoint(HALF):
        return precision
    (dtype,) = dtypes
    return replace(precision, compute="bf16" if dtype == torch.bfloat16 else "fp16")
