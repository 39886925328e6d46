"""The transforms that a config switches on. Each is imported where it is on: what is off costs no time at start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from engine.collectives.ledger import Ledger
from engine.contracts import ForwardBackward, Reduction, SavedWork, Slices, WholeSequences
from engine.mesh import Mesh
from engine.model.forward_backward import OneByOne
from engine.model.zero import ParameterShard
from engine.parameters import ParameterRegistry
from engine.plan import Plan

if TYPE_CHECKING:
    from engine.model.layer_drop import LayerDrop
    from engine.model.pipeline.cut import StagedModel
    from engine.model.token_drop import TokenDrop


def check_slices(model: nn.Module, blocks: Sequence[nn.Module], plan: Plan) -> None:
    """Raises EngineError where the ranks of sequence parallelism cannot share ``model``, before it is changed."""
    if plan.degrees.slices > 1:
        from engine.model.sequence_parallel import check

        check(model, blocks, plan)


def split_layers(
    model: nn.Module,
    registry: ParameterRegistry,
    blocks: Sequence[nn.Module],
    plan: Plan,
    mesh: Mesh,
    ledger: Ledger,
    granularity: Literal["elementwise", "whole", "flat"],
    training_data: Any = None,
    collate_fn: Callable[..., Any] | None = None,
) -> None:
    """Tensor parallelism over the tp ranks, or the split that the caller has made over them."""
    if mesh.degrees["tp"] == 1:
        return
    if mesh.split_by_caller:
        from engine.model.tensor_parallel.by_caller import adopt_split

        adopt_split(model, registry, mesh, ledger, granularity)
        return
    from engine.model.tensor_parallel.apply import apply
    from engine.model.tensor_parallel.given import tensor_plan_of

    tensor_plan = tensor_plan_of(model, plan, blocks, mesh, training_data, collate_fn)
    apply(model, registry, blocks, tensor_plan, mesh, ledger, granularity)


def cut_stages(
    model: nn.Module,
    registry: ParameterRegistry,
    blocks: Sequence[nn.Module],
    plan: Plan,
    mesh: Mesh,
    data: tuple[Any, Callable[..., Any] | None] = (None, None),
    loss_fn: Callable[..., Any] | None = None,
) -> StagedModel | None:
    """The pipeline stages of this rank; None without a pipeline. ``data``: the training data and its collate_fn."""
    if plan.pipeline is None:
        return None
    from engine.model.pipeline.cut import apply
    from engine.model.tensor_parallel.given import first_samples

    own = loss_fn or getattr(model, "loss_fn", None)
    return apply(model, registry, blocks, plan, mesh, lambda: first_samples(*data), own)


def share_over_stages(
    reduction: Reduction,
    registry: ParameterRegistry,
    frozen: Sequence[ParameterShard],
    mesh: Mesh,
    ledger: Ledger,
) -> Any:
    """``reduction`` itself where no parameter of this rank is on another pipeline rank too."""
    holders = registry.shared()
    if not holders:
        return reduction
    from engine.model.pipeline.shared import SharedAcrossStages

    return SharedAcrossStages(reduction, holders, frozen, mesh, ledger)


def run_windows(
    staged: StagedModel | None, plan: Plan, mesh: Mesh, ledger: Ledger, reduction: Reduction
) -> ForwardBackward:
    """The role that runs whole windows: by the schedule of a pipeline, else one micro-batch after the other."""
    if staged is None:
        return OneByOne()
    from engine.model.pipeline.schedule_runner import ScheduleRunner

    return ScheduleRunner(staged, plan, mesh, ledger, reduction)


def slice_sequences(model: nn.Module, blocks: Sequence[nn.Module], plan: Plan, mesh: Mesh, ledger: Ledger) -> Slices:
    """Sequence and context parallelism."""
    if mesh.num_slices == 1:
        return WholeSequences()
    from engine.model.sequence_parallel import apply

    return apply(model, blocks, plan, mesh, ledger)


def drop_tokens(
    model: nn.Module, blocks: Sequence[nn.Module], plan: Plan, mesh: Mesh, saved_work: SavedWork
) -> TokenDrop | None:
    """Random layerwise token dropping; None where it is off."""
    if plan.token_drop is None:
        return None
    from engine.model.token_drop import apply

    return apply(model, blocks, plan, plan.token_drop, mesh, saved_work)


def drop_layers(
    model: nn.Module, blocks: Sequence[nn.Module], plan: Plan, saved_work: SavedWork, rank: int
) -> LayerDrop | None:
    """Progressive layer drop; None where it is off."""
    if plan.layer_drop is None:
        return None
    from engine.model.layer_drop import apply

    return apply(model, blocks, plan, plan.layer_drop, saved_work, rank)
