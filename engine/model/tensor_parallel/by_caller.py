"""A model that its caller has split over model-parallel ranks (`initialize(mpu=...)`): what the engine must know of it.

As in DeepSpeed, a parameter with a true attribute ``tensor_model_parallel`` (or ``model_parallel``) is this rank's part
of a larger one; every other is the same on all model-parallel ranks, counts once in the gradient norm, and gets equal
gradients from the model's own operators.
"""

from __future__ import annotations

import zlib
from typing import Literal

import torch
from torch import nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.config.messages import EngineError
from engine.mesh import Mesh
from engine.parameters import ParameterRegistry

MARKS = ("tensor_model_parallel", "model_parallel")


def adopt_split(
    model: nn.Module,
    registry: ParameterRegistry,
    mesh: Mesh,
    ledger: Ledger,
    granularity: Literal["elementwise", "whole", "flat"],
) -> None:
    """Note in the registry which parameters the model-parallel ranks hold alike. All ranks call it.

    Raises EngineError for a model on meta, for an optimizer that needs whole matrices, and, on all ranks alike, where
    a parameter without the mark differs between ranks.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise EngineError("a model that is split already (mpu) cannot be on meta: build each part on the CPU")
    if granularity == "whole":
        raise EngineError("an optimizer that needs whole matrices cannot step on parts (mpu); use AdamW or Lamb")
    alike = {info.name for info, parameter in registry.parameters() if not _is_part(parameter)}
    group = ShardGroup.of(mesh, "tp", ledger)
    differing = _differing(registry, alike, group, mesh.device)
    everywhere = torch.tensor([float(len(differing))], dtype=torch.float64, device=mesh.device)
    ShardGroup.of(mesh, "world", ledger).sum(everywhere)
    if everywhere[0]:
        named = f": {', '.join(differing[:3])}" if differing else ""
        raise EngineError(
            f"parameters differ between the {group.size} model-parallel ranks and are not marked as parts{named}; set "
            "parameter.tensor_model_parallel = True on those that are split, and start the others equal"
        )
    registry.share(alike, group.size, group.rank)


def _is_part(parameter: nn.Parameter) -> bool:
    return any(bool(getattr(parameter, mark, False)) for mark in MARKS)


def _differing(registry: ParameterRegistry, alike: set[str], group: ShardGroup, device: torch.device) -> list[str]:
    """The parameters of ``alike`` that are not what the group's first rank has, by their check sums."""
    names, sums = [], []
    for info, parameter in registry.parameters():
        if info.name in alike:
            content = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            names.append(info.name)
            sums.append(zlib.crc32(content, zlib.crc32(f"{info.name} {info.shape}".encode())))
    count = torch.tensor([len(sums)], device=device)
    group.broadcast(count)
    unequal = torch.tensor([float(int(count) != len(sums))], dtype=torch.float64, device=device)
    if group.sum(unequal)[0]:
        return ["their number"]
    own = torch.tensor(sums, dtype=torch.int64, device=device)
    first = own.clone()
    group.broadcast(first)
    return [name for name, same in zip(names, (own == first).tolist(), strict=True) if not same]
