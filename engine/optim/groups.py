"""From the registry's parameter groups to the optimizer's: the same groups, holding this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn


class _Shard(Protocol):
    info: Any
    parameter: nn.Parameter


def shard_groups(
    options: Sequence[Mapping[str, Any]], shards: Sequence[_Shard], num_parameters: int
) -> list[dict[str, Any]]:
    """One torch parameter group per entry of ``options``, with the shards of its parameters (possibly none) in registry order.

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
