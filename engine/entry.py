"""`initialize`, `init_distributed` and `add_config_arguments`: how a script comes in."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from engine.build import build
from engine.collectives.stall import watch
from engine.config import Config, ConfigError, EngineError, Problem, examine
from engine.device import backend_for, current_device, device_kind
from engine.engine import Engine
from engine.launch.environment import RankEnvironment
from engine.mesh import join_process_group, leave_process_group
from engine.optim.optimizer import EngineOptimizer
from engine.plan import World, plan, usable

if TYPE_CHECKING:
    from engine.mpu import ModelParallelUnit

log = logging.getLogger("engine")

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    config: ConfigSource | None = None,
    *,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    config_params: ConfigSource | None = None,
    auto: Mapping[str, Any] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> tuple[Engine, EngineOptimizer | None, Any, Any]:
    """Make ``model`` train as ``config`` says. Returns ``(engine, optimizer, dataloader, lr_scheduler)``.

    ``config``: a path, a dict or a `Config`; ``config_params`` and ``args.deepspeed_config`` are DeepSpeed's other
    places for it. ``optimizer``: an optimizer built on the model's parameters, or a callable that builds one from
    them; it wins over the JSON's. ``lr_scheduler``: a scheduler, or a callable that builds one from the optimizer.
    ``training_data``: a map-style or iterable dataset; the dataloader returned yields this rank's micro-batches.
    ``loss_fn``: for `Engine.train_batch` with batches ``(inputs, targets)``. ``auto`` supplies values for "auto".
    ``mpu``: an object like Megatron's ``parallel_state`` (docs/placement.md).
    ``output``: a folder for metrics and monitors; without it relative paths lie under the working directory.

    The model is changed in place (placed, cast, sharded). A process group that exists is reused; where torchrun or
    SLURM variables describe one, it is made (``dist_init_required=False`` forbids that); else this is one process.

    Raises ConfigError with every problem of the config, EngineError for what does not fit the model or the world.
    """
    if model is None:
        raise EngineError("initialize() needs model=, a torch.nn.Module")
    if not isinstance(model, nn.Module):
        hint = ", not its class: call it" if isinstance(model, type) and issubclass(model, nn.Module) else ""
        raise EngineError(f"model= is {model!r}; initialize() takes a torch.nn.Module object{hint}")
    environment = _environment()
    source = _config_source(args, config, config_params)
    found = examine(source, auto=auto, overrides=_overrides(model, source, auto))
    loaded = usable(found, environment.world_size)
    device = current_device(environment.local_rank, None if loaded.device == "auto" else loaded.device)
    world = World(environment.world_size, environment.local_world_size, *device_kind(), how=_how(environment))
    unit = _model_parallel_unit(mpu, environment) if mpu is not None else None
    resolved = plan(loaded, unit.world(loaded, world) if unit is not None else world)
    if unit is not None:
        resolved = unit.check(resolved)
    if environment.rank == 0:
        _note_overridden(loaded, optimizer=optimizer, lr_scheduler=lr_scheduler)
    owns_group = False
    if environment.world_size > 1 and not dist.is_initialized():
        if dist_init_required is False:
            raise EngineError(
                f"{environment.launcher} describes {environment.world_size} ranks, but dist_init_required=False "
                "and there is no process group: call torch.distributed.init_process_group() first, or leave it out"
            )
        environment.export()
        owns_group = join_process_group(environment.rank, environment.world_size, "env://", device)
    watch.start()
    engine = build(
        resolved,
        model,
        device,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        output=Path(output) if output is not None else None,
        on_destroy=_leave if owns_group else lambda: None,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def init_distributed(dist_backend: str | None = None, timeout_seconds: float | None = None) -> bool:
    """Make the process group that torchrun's or SLURM's variables describe; one that exists is kept.

    The backend follows from the device; a ``dist_backend`` that is not among its backends is told and left aside.

    `initialize` does this by itself; scripts that communicate before it call this first. Returns whether there is a
    group now (one process needs none).
    """
    environment = _environment()
    if not dist.is_initialized():
        environment.export()
        device = current_device(environment.local_rank)
        if dist_backend is not None and dist_backend not in backend_for(device):
            log.warning("init_distributed: %s on %s instead of %s", backend_for(device), device.type, dist_backend)
        join_process_group(environment.rank, environment.world_size, "env://", device, timeout_seconds)
    return dist.is_initialized()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """DeepSpeed's command-line arguments: ``--deepspeed`` (a flag without effect) and ``--deepspeed_config PATH``."""
    group = parser.add_argument_group("engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted, without effect: a config always applies")
    group.add_argument("--deepspeed_config", metavar="PATH", default=None, help="the JSON config")
    return parser


def _config_source(
    args: argparse.Namespace | None, config: ConfigSource | None, config_params: ConfigSource | None
) -> ConfigSource:
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    present = {name: value for name, value in given.items() if value is not None}
    if len(present) != 1:
        found = f"{' and '.join(present)} were given" if present else "none was given"
        message, repair = f"initialize() takes one config; {found}", "pass config= alone"
        raise ConfigError(
            [Problem("config", message, "source", found=list(present), allowed=", ".join(given), repair=repair)]
        )
    return next(iter(present.values()))


def _note_overridden(config: Config, **clients: Any) -> None:
    """What the script brings along wins over what the config names; neither is dropped in silence."""
    for argument, section in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
        if clients[argument] is not None and getattr(config, section) is not None:
            log.warning("%s= was passed, so the section %s of the config has no effect", argument, section)


def _environment() -> RankEnvironment:
    """The ranks of the process group if there is one, else those that the launcher's variables describe."""
    if not dist.is_initialized():
        return RankEnvironment.read()
    size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() % local_size))
    return RankEnvironment(dist.get_rank(), local_rank, size, local_size, launcher="torchrun")


def _overrides(model: nn.Module, source: ConfigSource, auto: Mapping[str, Any] | None) -> dict[str, Any]:
    if not getattr(model, "is_layer_sequence", False):
        return {}
    from engine.model.pipeline.module import overrides_of

    return overrides_of(model, source, auto)


def _model_parallel_unit(mpu: Any, environment: RankEnvironment) -> ModelParallelUnit:
    if environment.world_size > 1 and not dist.is_initialized():
        raise EngineError("mpu= has no groups without a process group: call init_distributed() before it is made")
    from engine.mpu import ModelParallelUnit

    return ModelParallelUnit(mpu, environment.rank)


def _leave() -> None:
    watch.stop()
    leave_process_group()


def _how(environment: RankEnvironment) -> str:
    if dist.is_initialized():
        return "the process group"
    if environment.launcher == "single":
        return "no process group and no torchrun or SLURM variables"
    return f"{environment.launcher}'s variables"
