"""The tensor plan of a model that is about to be built: looked for, proved and printed where layers are split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from engine.config.messages import EngineError
from engine.config.sections.parallel import TensorParallelSection
from engine.mesh import Mesh
from engine.model.tensor_parallel.find import find_plan
from engine.model.tensor_parallel.json_plan import sequence_names
from engine.model.tensor_parallel.split import TensorPlan
from engine.plan import Plan
from engine.plan.tensor_parallel import cutting_blocks_out

log = logging.getLogger("engine")


def tensor_plan_of(
    model: nn.Module,
    plan: Plan,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    training_data: Any = None,
    collate_fn: Callable[..., Any] | None = None,
) -> TensorPlan:
    """How ``model`` is split; rank 0 tells the plan: as a warning where nobody wrote it, else as information.

    A model may bring a `TensorPlan` of its own as ``model.tensor_plan``; it counts where the JSON writes none, and its
    author is taken at their word. Raises EngineError as `find_plan` does, the same on all ranks.
    """
    settings = plan.config.tensor_parallel
    if own := own_tensor_plan(model, settings):
        _check_sequence(own, plan)
        return own
    sample = first_samples(training_data, collate_fn)
    found = find_plan(model, blocks, mesh, settings, plan.config.locate, sample)
    if mesh.rank == 0:
        level = logging.WARNING if found.plan.origin == "inferred" else logging.INFO
        for line in found.lines:
            log.log(level, "%s", line)
    sequence = sequence_names(model, settings.plan) if settings is not None else ()
    return replace(found.plan, sequence=sequence)


def own_tensor_plan(model: nn.Module, settings: TensorParallelSection | None) -> TensorPlan | None:
    """``model.tensor_plan`` where it counts."""
    own = getattr(model, "tensor_plan", None)
    is_written = settings is not None and (settings.plan or settings.partition_config)
    return own if isinstance(own, TensorPlan) and not is_written else None


def _check_sequence(tensor_plan: TensorPlan, plan: Plan) -> None:
    """What the plan of the config checks of a tensor plan that stands in it, for one that the model brings."""
    if tensor_plan.sequence and plan.pipeline is not None:
        raise EngineError(
            "model.tensor_plan: norms on shards of the sequence hand shards to the next block, and under "
            f"pipeline.stages {plan.degrees.pp} hidden states travel whole; leave the norms out of the plan"
        )
    if tensor_plan.sequence and (others := cutting_blocks_out(plan.config)):
        raise EngineError(
            f"model.tensor_plan: norms on shards of the sequence need every block on all tokens, and {others[0]} "
            "leaves blocks or tokens out; switch it off, or leave the norms out of the plan"
        )


def first_samples(training_data: Any, collate_fn: Callable[..., Any] | None = None) -> Any:
    """The first two samples of a map-style dataset as one batch; None where there is no such batch."""
    try:
        return (collate_fn or default_collate)([training_data[0], training_data[1]])
    except Exception:  # whatever it is, it is only the last of several things to try
        return None
