"""From the plan to the engine's own loader, to what its curricula do to a step, and to what they let be drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config import Config
from engine.contracts import EngineError, NoCurriculum
from engine.data.batch import describe
from engine.data.curriculum_role import DataCurriculum
from engine.data.difficulty_index import open_indexes
from engine.data.loader import DistributedLoader
from engine.data.sampling import CurriculumSampler, Drawn
from engine.data.sequences import REMEDY, batch_shape, named_tensors
from engine.mesh import Mesh
from engine.plan import Plan


def build_loader(
    plan: Plan, mesh: Mesh, training_data: Any, collate_fn: Callable[..., Any] | None
) -> DistributedLoader | None:
    """None without ``training_data``."""
    if training_data is None:
        return None
    config = plan.config
    sampling = config.data_efficiency.data_sampling if config.data_efficiency is not None else None
    return DistributedLoader(
        training_data,
        plan.batch.micro_batch_size,
        plan.batch.accumulation_steps,
        mesh.dp_size,
        mesh.dp_rank,
        plan.seed,
        drop_last=config.dataloader_drop_last,
        # DeepSpeed's other place for it
        num_workers=config.data.num_workers or (sampling.num_workers if sampling is not None else 0),
        collate_fn=collate_fn,
        pin_memory=mesh.device.type != "cpu",
    )


def build_curriculum(plan: Plan, model: nn.Module, loader: DistributedLoader | None) -> DataCurriculum | NoCurriculum:
    """Raises EngineError, before any step, for data without a sequence dimension, a metric that the index lacks, an
    index of other data, a first difficulty that admits no sample, and a sampler without the engine's own loader."""
    if plan.curriculum is None:
        return NoCurriculum()
    takes_length = "curriculum_seqlen" in inspect.signature(model.forward).parameters
    role = DataCurriculum(plan.curriculum, plan.config.sequence_keys, takes_length)
    if plan.curriculum.sampled:
        _draw_by(role, plan, loader)
    if loader is not None:
        loader.present = role.cut
        if plan.curriculum.cutting is not None:
            _check_first_sample(loader, plan)
    return role


def index_folder(config: Config, path: str) -> Path:
    """A relative ``data_cluster_path`` counts from the config's folder; without a file, from the working directory."""
    return config_folder(config) / Path(path).expanduser()


def config_folder(config: Config) -> Path:
    return Path(config.source).resolve().parent if config.source else Path.cwd()


def _draw_by(role: DataCurriculum, plan: Plan, loader: DistributedLoader | None) -> None:
    assert plan.curriculum is not None
    metrics = plan.curriculum.sampled
    names = ", ".join(metric.name for metric in metrics)
    if loader is None:
        raise EngineError(
            f"curriculum: samples are drawn by {names}, which only the engine's own loader can do: pass "
            "training_data= to initialize()"
        )
    if loader.is_stream:
        raise EngineError(
            f"curriculum: samples are drawn by {names}, and {type(loader.dataset).__name__} is iterable: it needs "
            "__getitem__ and __len__"
        )
    assert plan.curriculum.index_path is not None
    folder = index_folder(plan.config, plan.curriculum.index_path)
    indexes = open_indexes(folder, metrics, loader.dataset, config_folder(plan.config))
    sampler = CurriculumSampler(metrics, indexes, plan.curriculum.seed, role.functions)
    if sampler.always_admits_all():
        # Nothing to choose: the order is that of a run without a curriculum.
        role.sampled = lambda: sampler.difficulties(1)
        return
    loader.sampler, role.sampled = sampler, loader.difficulties
    if all(metric.schedule.type != "custom" for metric in metrics):
        sampler.draw(Drawn(), loader.split.global_batch_size)


def _check_first_sample(loader: DistributedLoader, plan: Plan) -> None:
    """Of the first sample, made a batch of one: what has no sequence dimension is refused before training."""
    if loader.is_stream:
        return
    with torch.random.fork_rng(devices=[]):
        try:
            batch: Any = loader.collate_fn([loader.dataset[0]])
        except Exception:
            return  # a collate_fn that does not take one sample alone: the first forward will tell
    tensors = named_tensors(batch)
    if tensors and batch_shape(tensors, plan.config.sequence_keys) is None:
        there = ", ".join(f"{name or 'it'}: {describe(tensor)}" for name, tensor in tensors.items())
        raise EngineError(
            f"curriculum: a batch of the training data has no sequence dimension ({there}): none of its tensors holds "
            f"token ids, integers of shape (batch, sequence); {REMEDY}"
        )
