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
from engine.collectives.whole import join_parts
from engine.model.zero.fully_sharded import local_part, row_range
from engine.model.zero.layout import compute_dtype
from engine.parameters import ParameterInfo, persistent_buffers


@torch.no_grad()
def save_16bit_model(
    engine: Any, save_dir: str | os.PathLike[str], save_filename: str, exclude_frozen_parameters: bool
) -> bool:
    """See `Surface.save_16bit_model`. Parameters are gathered one at a time; rank 0 writes each as it comes."""
    target = Path(save_dir) / save_filename
    engine._bring_together()
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
        self._sources: dict[str, tuple[Tensor | None, ParameterInfo | None, int]] = {}
        self._shards, self._parts, self._stages = (
            ShardGroup.of(engine.mesh, axis, engine.ledger) for axis in ("dp_shard", "tp", "pp")
        )
        registry, self._device = engine.parameter_registry, engine.mesh.device
        held = registry.objects_in(engine.module)
        for info in registry.infos:
            if exclude_frozen and not info.trainable:
                continue
            dtype, stage = compute_dtype(info.dtype, precision), registry.stages_of[info.index][0]
            for name in (info.name, *info.aliases):
                self._add(name, held.get(info.index), info.global_shape, dtype, info, stage)
        buffers = persistent_buffers(engine.module)
        facts = registry.buffer_facts or {name: (tuple(b.shape), b.dtype) for name, b in buffers.items()}
        for name, (shape, dtype) in facts.items():
            stage = registry.buffer_stages.get(name, 0)
            dtype = buffers[name].dtype if name in buffers else dtype
            self._add(name, buffers.get(name), shape, dtype, None, stage)
        self._coming = self._gather(in_order(self.weights))

    def _add(
        self,
        name: str,
        source: Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        info: ParameterInfo | None,
        stage: int,
    ) -> None:
        self._sources[name] = source, info, stage
        self.weights.append(Weight(name, tuple(shape), dtype, lambda: next(self._coming)))

    def _gather(self, order: Sequence[Weight]) -> Iterator[Tensor]:
        """Whole, from the shards of the stage that has it, then from there to the other stages."""
        for weight in order:
            source, info, stage = self._sources[weight.name]
            values = None if source is None else local_part(source.detach()).to(weight.dtype)
            if info is not None and values is not None:
                if isinstance(source, DTensor):
                    values = self._of_all_rows(values, info)
                cuts = {} if info.cut is None else {info.name: info.cut}
                values = join_parts({info.name: values}, cuts, self._parts, values.device)[info.name]
            if self._stages.size > 1:
                if values is None or stage != self._stages.rank:
                    values = torch.empty(weight.shape, device=self._device, dtype=weight.dtype)
                values = values.contiguous()
                self._stages.broadcast(values, stage)
            assert values is not None
            yield values.cpu()

    def _of_all_rows(self, rows: Tensor, info: ParameterInfo) -> Tensor:
        """What the data-parallel ranks hold together of the parameter, of which ``rows`` are this rank's."""
        size = self._shards.size
        bounds = [row_range(info.shape, rank, size)[0] for rank in range(size)] + [info.numel]
        flat = torch.empty(info.numel, dtype=rows.dtype, device=rows.device)
        flat[bounds[self._shards.rank] : bounds[self._shards.rank + 1]] = rows.reshape(-1)
        self._shards.all_gather(flat, bounds, "gathering weights to write").wait()
        return flat.view(info.shape)

    def drain(self) -> None:
        for _ in self._coming:
            pass
