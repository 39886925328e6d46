"""The transforms that a config switches on. Each is imported where it is on: what is off costs no time at start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from engine.collectives.ledger import Ledger
from engine.contracts import SavedWork, Slices, WholeSequences
from engine.mesh import Mesh
from engine.parameters import ParameterRegistry
from engine.plan import Plan

if TYPE_CHECKING:
    from engine.model.layer_drop import LayerDrop
    from engine.model.token_drop import TokenDrop


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

        return adopt_split(model, registry, mesh, ledger, granularity)
    from engine.model.tensor_parallel.apply import apply
    from engine.model.tensor_parallel.given import tensor_plan_of

    tensor_plan = tensor_plan_of(model, plan, blocks, mesh, training_data, collate_fn)
    return apply(model, registry, blocks, tensor_plan, mesh, ledger, granularity)


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
