"""From the registry's parameter groups to the optimizer: the same groups, holding this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from engine.optim.client import rebind
from engine.optim.factory import build_optimizer
from engine.optim.lamb import Lamb, NormReduce
from engine.optim.optimizer import EngineOptimizer
from engine.parameters import ParameterRegistry
from engine.plan.plan import OptimizerPlan


class _Shard(Protocol):
    @property
    def info(self) -> Any: ...
    @property
    def parameter(self) -> nn.Parameter: ...


def shard_groups(
    options: Sequence[Mapping[str, Any]], shards: Sequence[_Shard], num_parameters: int
) -> list[dict[str, Any]]:
    """One torch parameter group per entry of ``options``, with the shards of its parameters in registry order.

    Besides ``params`` and ``names`` a group says where its parameters stand in the whole model (see `Lamb`).
    """
    groups: list[dict[str, Any]] = [
        {**option, "params": [], "names": [], "global_index": [], "global_ndim": [], "num_global": num_parameters}
        for option in options
    ]
    for shard in sorted(shards, key=lambda shard: shard.info.index):
        group = groups[shard.info.group]
        group["params"].append(shard.parameter)
        group["names"].append(shard.info.name)
        group["global_index"].append(shard.info.index)
        group["global_ndim"].append(len(shard.info.shape))
    return groups


def optimizer_over(
    shards: Sequence[_Shard],
    registry: ParameterRegistry,
    plan: OptimizerPlan | None,
    client: torch.optim.Optimizer | None,
    norm_reduce: NormReduce,
) -> EngineOptimizer | None:
    """The client's optimizer moved onto ``shards``, else the plan's built on them, else None.

    ``norm_reduce`` sums norms over the ranks that hold the other shards.
    """
    if client is None:
        if plan is None:
            return None
        return build_optimizer(plan, shard_groups(registry.groups, shards, len(registry)), norm_reduce=norm_reduce)
    held: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for shard in shards:
        held.setdefault(shard.info.index, []).append((shard.info.name, shard.parameter))

    def shards_of(parameter: nn.Parameter) -> list[tuple[str, nn.Parameter]] | None:
        info = registry.info(parameter)
        return None if info is None else held.get(info.index, [])

    stepper = rebind(client, shards_of)
    if isinstance(client, Lamb):
        _reduce_norms(client, registry, norm_reduce)
    return stepper


def _reduce_norms(optimizer: Lamb, registry: ParameterRegistry, norm_reduce: NormReduce) -> None:
    """Trust ratios of whole parameters for a client's Lamb, which now holds shards of them."""
    for group in optimizer.param_groups:
        infos = [registry.by_name[name] for name in group["param_names"]]
        group["global_index"] = [info.index for info in infos]
        group["global_ndim"] = [len(info.shape) for info in infos]
        group["num_global"] = len(registry)
    optimizer.norm_reduce = norm_reduce
