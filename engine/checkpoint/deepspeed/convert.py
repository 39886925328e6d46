"""A DeepSpeed checkpoint becomes one of this engine's: parameters, moments, schedule, loss scale, counters.

Bytes go from file to file; no tensor is joined in memory, since a flat range of a parameter is a few boxes of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.deepspeed.files import LossScaler, SavedFiles, find_checkpoint, read_files
from engine.checkpoint.deepspeed.layouts import Trained, trained_parameters
from engine.checkpoint.deepspeed.partitions import Part, chunks_of, sharded_parts
from engine.checkpoint.errors import CheckpointError, listing
from engine.checkpoint.extra_state import chunks_of_value, is_extra_state
from engine.checkpoint.json_values import encode
from engine.checkpoint.model_facts import ModelFacts
from engine.checkpoint.saving import save
from engine.contracts import Chunk, SavedLayout

_DEEPSPEEDS_OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("csr_tensor_module_names", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
    *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts"),
}
_GROUP_OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "alpha", "centered", "amsgrad"),
    *("maximize", "initial_lr", "rho", "lr_decay", "etas", "step_sizes", "momentum_decay", "lambd", "t0"),
)
_SCHEDULED = ("lr", "momentum", "betas")


def import_checkpoint(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    tag: str | None = None,
    weights_only: bool = False,
) -> tuple[Path, list[str]]:
    """Read the DeepSpeed checkpoint in ``source`` and save it under ``to``, with the same tag.

    ``source``: a folder with `latest` (``tag`` chooses another), or one checkpoint's. ``weights_only`` leaves out the
    optimizer's state. Returns the new checkpoint's path and one sentence for each thing that could not come along.

    Raises `CheckpointError` for files that are missing, damaged or name classes outside the allow-list
    (engine/checkpoint/deepspeed/files.py), and for tensor, pipeline and expert parallelism.
    """
    files = read_files(find_checkpoint(source, tag))
    model = files.models[0]
    notes: list[str] = []
    module = dict(_mapping(model.get("module"), files, "module"))
    extra = {key: module.pop(key) for key in list(module) if is_extra_state(key)}
    buffers = set(model.get("buffer_names") or ())
    aliases = _aliases(model, module, buffers)
    shapes = {name: tuple(value.shape) for name, value in module.items() if name not in (*buffers, *aliases)}
    trained = trained_parameters(files, shapes, module, weights_only)
    chunks = [Chunk.whole(f"buffers.{name}", module[name]) for name in sorted(buffers)]
    chunks += chunks_of(trained.parts, trained.values, "parameters")
    for key in [] if weights_only else trained.moment_keys():
        chunks += trained.moments(key)
    chunks += [] if weights_only else trained.scalars()
    for key, value in extra.items():
        try:
            chunks += chunks_of_value(key, value)
        except CheckpointError as error:
            notes.append(f"Left out: {error}")
    frozen = [name for name in shapes if name not in trained.names]
    chunks += _frozen(files, trained.stage, frozen, module)
    states = _states(model, trained, frozen, weights_only)
    counters = states["run"]["state"]
    client_state = {key: value for key, value in model.items() if key not in _DEEPSPEEDS_OWN}
    for key, value in list(client_state.items()):
        try:
            encode(value, f"client_state.{key}", lambda tensor: "")
        except CheckpointError as error:
            del client_state[key]
            notes.append(f"Left out: {error}")
    notes += trained.notes
    if model.get("data_sampler") is not None:
        notes.append("Left out: the state of DeepSpeed's data sampler.")
    path = save(
        to,
        files.path.name,
        chunks=chunks,
        states=states,
        layout=SavedLayout(len(files.optimizers) or 1, trained.stage, {}, _global_batch(model)),
        client_state=client_state,
        config=_config(model, notes),
        counters=counters,
        aliases=aliases,
        rank=0,
        world_size=1,
    )
    return path, notes


def _states(model: Mapping[str, Any], trained: Trained, frozen: list[str], weights_only: bool) -> dict[str, Any]:
    config = model.get("ds_config") or {}
    steps = int(model.get("global_steps", 0))
    accumulation = config.get("gradient_accumulation_steps")
    found: dict[str, Any] = {
        "run": {
            "global_steps": steps,
            "global_samples": int(model.get("global_samples", 0)),
            "global_tokens": 0,
            "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
            "skipped_steps": int(model.get("skipped_steps", 0)),
        },
        ModelFacts.name: ModelFacts(frozen).state(),
    }
    if not weights_only:
        groups = [{key: group[key] for key in _GROUP_OPTIONS if key in group} for group in trained.groups]
        if groups:
            found["optimizer_groups"] = {"kinds": None, "groups": groups}
        if (schedule := model.get("lr_scheduler")) is not None:
            kind = (config.get("scheduler") or {}).get("type")
            scheduled = [{key: group[key] for key in _SCHEDULED if key in group} for group in groups]
            found["lr_scheduler"] = {"type": kind, "scheduler": schedule, "groups": scheduled}
        if (scaler := _loss_scaler(trained.loss_scaler, config)) is not None:
            found["loss_scaler"] = scaler
    return {name: {"on_layout_change": "reshard", "state": state} for name, state in found.items()}


def _loss_scaler(saved: Any, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of `engine.optim.loss_scaler.LossScaler`, whose rule is DeepSpeed's; None for a static scale."""
    known = vars(saved) if isinstance(saved, LossScaler) else saved if isinstance(saved, Mapping) else {}
    if "last_overflow_iter" not in known:
        return None
    hysteresis = (config.get("fp16") or {}).get("hysteresis", 2)
    return {
        "dynamic": True,
        "scale": float(known["cur_scale"]),
        "iteration": int(known["cur_iter"]),
        "last_overflow": int(known["last_overflow_iter"]),
        "hysteresis": int(known.get("cur_hysteresis", hysteresis)),
    }


def _frozen(files: SavedFiles, stage: int, names: list[str], module: Mapping[str, Any]) -> list[Chunk]:
    if stage < 3:
        return [Chunk.whole(f"parameters.{name}", module[name]) for name in names]
    shapes = files.models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in files.models]
    unknown = [name for name in names if name not in shapes or any(name not in held for held in fragments)]
    if unknown:
        raise CheckpointError(f"{files.path} holds no values of {listing(unknown)}: saved without frozen parameters?")
    chunks: list[Chunk] = []
    for name in names:
        vectors = [[held[name]] for held in fragments]
        parts: list[Part] = list(sharded_parts([{name: shapes[name]}], [vectors[0][0].numel()], len(vectors)))
        chunks += chunks_of(parts, vectors, "parameters")
    return chunks


def _aliases(model: Mapping[str, Any], module: Mapping[str, Any], buffers: set[str]) -> dict[str, str]:
    """Other name -> first name of tied parameters: what DeepSpeed noted, else names that share memory."""
    noted = model.get("shared_params")
    if noted is not None:
        return {str(alias): str(name) for alias, name in dict(noted).items() if alias in module and name in module}
    first: dict[tuple[int, torch.Size], str] = {}
    aliases = {}
    for name, value in module.items():
        if name in buffers or not isinstance(value, torch.Tensor) or not value.numel():
            continue
        owner = first.setdefault((value.data_ptr(), value.shape), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def _global_batch(model: Mapping[str, Any]) -> int:
    config = model.get("ds_config") or {}
    if isinstance(config.get("train_batch_size"), int):
        return int(config["train_batch_size"])
    steps, samples = int(model.get("global_steps", 0)), int(model.get("global_samples", 0))
    return samples // steps if steps else 0


def _config(model: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    config = model.get("ds_config") or {}
    try:
        encode(config, "config")
    except CheckpointError as error:
        notes.append(f"Left out: {error}")
        return {}
    return dict(config)


def _mapping(value: Any, files: SavedFiles, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{files.path}: {name!r} is not in the model's file, so it is not DeepSpeed's.")
    return value
