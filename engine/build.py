"""Plan + the user's model -> Engine. One page, one visible order; a feature's place in it is its line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.checkpoint.model_facts import ModelFacts
from engine.checkpoint.random_states import RandomStates
from engine.checkpoint.tree import StateTree
from engine.collectives.ledger import Ledger
from engine.collectives.norms import NormSum
from engine.collectives.shards import ShardGroup
from engine.contracts import NoSchedule, Reduction, SavedLayout, SavedWork, Stateful
from engine.data.build import build_curriculum, build_loader
from engine.engine import Engine
from engine.mesh import Mesh
from engine.model import transforms, zero
from engine.model.blocks import find_blocks
from engine.optim.client import client_optimizer
from engine.optim.clipping import build_clipping
from engine.optim.compressed import connect
from engine.optim.factory import granularity_of
from engine.optim.groups import optimizer_over
from engine.optim.loss_scaler import LossScaler
from engine.optim.optimizer import EngineOptimizer
from engine.optim.schedule_factory import schedule_on
from engine.optim.schedule_role import EngineSchedule
from engine.optim.schedule_state import ScheduleState
from engine.parameters import ParameterRegistry, check_free, claim
from engine.plan import Plan
from engine.surface import Roles
from engine.watch import build_watchers


def build(
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    *,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    output: Path | None = None,
    on_destroy: Callable[[], None] = lambda: None,
) -> Engine:
    """Apply the plan to ``model``, in place. The process group exists already where there is more than one rank."""
    # who is where, and who is who
    check_free(model)
    mesh, ledger = Mesh(plan.degrees, device, shards=plan.zero.stage > 0), Ledger()
    blocks = find_blocks(model, plan.block_path)
    client = client_optimizer(optimizer, model, model_parameters)
    registry = ParameterRegistry(model, client.param_groups if client is not None else model_parameters, blocks)

    # transforms, outermost axis first
    granularity, saved_work = granularity_of(plan.optimizer, client), SavedWork()
    transforms.check_slices(model, blocks, plan)  # of the model as its author wrote it
    transforms.split_layers(model, registry, blocks, plan, mesh, ledger, granularity, training_data, collate_fn)
    staged = transforms.cut_stages(model, registry, blocks, plan, mesh, (training_data, collate_fn), loss_fn)
    runs = [blocks] if staged is None else staged.runs
    slices = transforms.slice_sequences(model, blocks, plan, mesh, ledger)
    on_tokens = transforms.drop_tokens(model, blocks, plan, mesh, saved_work)
    dropped = transforms.drop_layers(model, blocks, plan, saved_work, mesh.rank)
    data_parallel = zero.apply(model, registry, runs, plan, mesh, ledger, granularity)
    reduction = transforms.share_over_stages(data_parallel.reduction, registry, data_parallel.frozen, mesh, ledger)

    # data and roles
    loader = build_loader(plan, mesh, training_data, collate_fn)
    curriculum = build_curriculum(plan, model, loader)
    sum_norms = NormSum(mesh, registry, [ShardGroup.of(mesh, axis, ledger) for axis in ("dp_shard", "tp")])
    stepper = optimizer_over(reduction.shards, registry, plan.optimizer, client, sum_norms)
    connect(stepper.inner if stepper else (), data_parallel.reduction, registry.shared(), mesh, ledger)
    schedule = schedule_on(stepper, plan.schedule, lr_scheduler)
    precision = LossScaler(plan.precision.loss_scale)
    if stepper is not None:
        stepper.bind(loss_scale=lambda: precision.scale, zero_gradients=lambda: None)
    clipping, role = build_clipping(plan.gradient_clipping), EngineSchedule(schedule)
    windows = transforms.run_windows(staged, plan, mesh, ledger, reduction)
    cut_loss_fn = curriculum.around(slices.around(loss_fn or getattr(model, "loss_fn", None)))
    roles = Roles(
        reduction,
        precision,
        clipping,
        stepper,
        role,
        curriculum,
        windows,
        cut_loss_fn,
        saved_work,
        num_layers=len(blocks),
        layer_drop=dropped,
        token_drop=on_tokens,
        slices=slices,
    )

    # state
    state = StateTree(
        trained=reduction.shards,
        frozen=data_parallel.frozen,
        model=model,
        optimizer=stepper,
        registry=registry,
        writes_shards=data_parallel.writes_shards,
        mesh=mesh,
        layout=SavedLayout(
            mesh.world_size, plan.zero.stage, dict(mesh.degrees), plan.batch.global_batch_size, plan.degrees.placement
        ),
        config=plan.config.raw,
        settings=plan.config.checkpoint,
        ledger=ledger,
    )
    scheduled = None if isinstance(schedule, NoSchedule) else ScheduleState(schedule)
    state.add(scheduled, precision, loader, curriculum if isinstance(curriculum, Stateful) else None, RandomStates())
    state.add(ModelFacts([info.name for info in registry.infos if not info.trainable]))
    model.register_load_state_dict_post_hook(partial(_adopt_values, reduction, stepper))

    claim(model)
    return Engine(
        model,
        plan,
        mesh,
        registry,
        roles,
        ledger,
        compute_dtype=zero.DTYPES[plan.precision.compute] if plan.precision.compute != "fp32" else None,
        autocast=zero.autocast(plan.precision, device),
        watchers=build_watchers(plan, output, mesh.rank, mesh.world_size),
        state=state,
        frozen=data_parallel.frozen,
        training_dataloader=loader,
        lr_scheduler=None if isinstance(schedule, NoSchedule) else schedule,
        on_destroy=on_destroy,
    )


def _adopt_values(
    reduction: Reduction, stepper: EngineOptimizer | None, module: nn.Module, incompatible_keys: object
) -> None:
    """Values that came from a state dict count from here on, also where an optimizer remembers others."""
    reduction.adopt_values()
    if stepper is not None:
        stepper.state_was_loaded()
