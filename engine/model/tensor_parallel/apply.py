"""`apply` splits a model's layers over the tp axis, in place. Why on plain local tensors: docs/adr/0011."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.config.messages import EngineError
from engine.mesh import Mesh
from engine.model.tensor_parallel.cuts import parameter_cuts, set_attributes
from engine.model.tensor_parallel.forwards import split_forwards
from engine.model.tensor_parallel.region import Region
from engine.model.tensor_parallel.split import TensorPlan
from engine.parameters import ParameterRegistry


def apply(
    model: nn.Module,
    registry: ParameterRegistry,
    blocks: Sequence[nn.Module],
    plan: TensorPlan,
    mesh: Mesh,
    ledger: Ledger,
    granularity: Literal["elementwise", "whole", "flat"] = "elementwise",
) -> None:
    """Split ``model`` as ``plan`` says.

    Forwards are replaced and the registry told which part of each parameter is this rank's; the parameters themselves
    are cut when they are made real (engine/model/materialise.py). Raises EngineError for a plan that does not fit.
    """
    size, rank = mesh.degrees["tp"], mesh.coordinates["tp"]
    if granularity == "whole":
        raise EngineError(
            "tensor_parallel: an optimizer that needs whole matrices (Muon, Adafactor, a class that is not known here) "
            "cannot step on parts of them; use an elementwise one such as AdamW, or Lamb"
        )
    cuts = parameter_cuts(model, registry, plan, size, rank, blocks)
    uneven = [name for name, cut in cuts.items() if not cut.is_even]
    if granularity == "flat" and uneven:
        raise EngineError(
            f"tensor_parallel: a 1-bit optimizer keeps errors of one size on every rank, and {uneven[0]} of shape "
            f"{cuts[uneven[0]].global_shape} cannot be shared evenly by {size} ranks; pad it, or use AdamW"
        )
    weights = {}
    for name in plan.splits:
        info = registry.info(model.get_submodule(name).weight)  # type: ignore[arg-type]
        assert info is not None
        weights[name] = cuts[info.name]
    registry.split(cuts, size, rank)
    set_attributes(model, plan)
    split_forwards(model, plan, weights, blocks, Region(ShardGroup.of(mesh, "tp", ledger), mesh.device))
    model.register_load_state_dict_pre_hook(partial(_take_parts, registry))


def _take_parts(
    registry: ParameterRegistry, model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *rest: object
) -> None:
    """A state dict of the whole model, as anybody else writes it, is cut to this rank's parts as it is loaded."""
    for info in registry.infos:
        for name in (info.name, *info.aliases):
            value = state_dict.get(prefix + name)
            if info.cut is not None and value is not None and tuple(value.shape) == info.global_shape:
                state_dict[prefix + name] = info.part(value)
