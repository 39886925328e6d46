"""The weights of a running engine as one file, whatever its ZeRO stage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engine.checkpoint.exchange import exchange_of
from engine.checkpoint.weight_files import Weight, in_order, write_weights
from engine.collectives.shards import ShardGroup
from engine.model.zero.layout import compute_dtype
from engine.parameters import persistent_buffers


@torch.no_grad()
def save_16bit_model(
    engine: Any, save_dir: str | os.PathLike[str], save_filename: str, exclude_frozen_parameters: bool
) -> bool:
    """See `Surface.save_16bit_model`. Parameters are gathered one at a time; rank 0 writes each as it comes."""
    target = Path(save_dir) / save_filename
    exchange = exchange_of(None, engine.mesh.rank, engine.mesh.world_size)
    gathered = _Gathered(engine, exclude_frozen_parameters)

    def write() -> None:
        try:
            write_weights(target, gathered.weights)
        finally:
            gathered.drain()  # the other ranks take part in every gather, whatever became of the file

    if exchange.rank != 0:
        gathered.drain()
    exchange.on_first(write, f"Writing {target}")
    return True


class _Gathered:
    """The engine's state dict as `Weight`s. All ranks walk them in the same order, for gathering is collective."""

    def __init__(self, engine: Any, exclude_frozen: bool) -> None:
        precision = engine.plan.precision
        for module in engine.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves them gathered, as plain tensors
        self.weights: list[Weight] = []
        self._sources: dict[str, tuple[Tensor | None, int]] = {}
        registry = engine.parameter_registry
        held = registry.objects_in(engine.module)
        self._stages, self._device = ShardGroup.of(engine.mesh, "pp", engine.ledger), engine.mesh.device
        for info in registry.infos:
            if exclude_frozen and not info.trainable:
                continue
            dtype, stage = compute_dtype(info.dtype, precision), registry.stages_of[info.index][0]
            for name in (info.name, *info.aliases):
                self._add(name, held.get(info.index), stage, info.shape, dtype)
        buffers = persistent_buffers(engine.module)
        facts = registry.buffer_facts or {name: (tuple(b.shape), b.dtype) for name, b in buffers.items()}
        for name, (shape, dtype) in facts.items():
            stage = registry.buffer_stages.get(name, 0)
            dtype = buffers[name].dtype if name in buffers else dtype
            self._add(name, buffers.get(name), stage, shape, dtype)
        self._coming = self._gather(in_order(self.weights))

    def _add(self, name: str, source: Tensor | None, stage: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._sources[name] = source, stage
        self.weights.append(Weight(name, tuple(shape), dtype, lambda: next(self._coming)))

    def _gather(self, order: Sequence[Weight]) -> Iterator[Tensor]:
        """Whole, from the shards of the stage that has it, then from there to the other stages."""
        for weight in order:
            source, stage = self._sources[weight.name]
            whole = None if source is None else source.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            if self._stages.size > 1:
                if whole is None or stage != self._stages.rank:
                    whole = torch.empty(weight.shape, device=self._device, dtype=weight.dtype)
                whole = whole.to(self._device, weight.dtype).contiguous()
                self._stages.broadcast(whole, stage)
            assert whole is not None
            yield whole.to("cpu", weight.dtype)

    def drain(self) -> None:
        for _ in self._coming:
            pass
