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
        self._sources: dict[str, tuple[Tensor, ParameterInfo | None]] = {}
        self._shards, self._parts = (ShardGroup.of(engine.mesh, axis, engine.ledger) for axis in ("dp_shard", "tp"))
        for info in engine.parameter_registry.infos:
            if exclude_frozen and not info.trainable:
                continue
            parameter, dtype = engine.module.get_parameter(info.name), compute_dtype(info.dtype, precision)
            for name in (info.name, *info.aliases):
                self._add(name, parameter, info.global_shape, dtype, info)
        for name, buffer in persistent_buffers(engine.module).items():
            self._add(name, buffer, tuple(buffer.shape), buffer.dtype, None)
        self._coming = self._gather(in_order(self.weights))

    def _add(
        self, name: str, source: Tensor, shape: Sequence[int], dtype: torch.dtype, info: ParameterInfo | None
    ) -> None:
        self._sources[name] = source, info
        self.weights.append(Weight(name, tuple(shape), dtype, lambda: next(self._coming)))

    def _gather(self, order: Sequence[Weight]) -> Iterator[Tensor]:
        for weight in order:
            source, info = self._sources[weight.name]
            values = local_part(source.detach()).to(weight.dtype)
            if info is not None:
                if isinstance(source, DTensor):
                    values = self._of_all_rows(values, info)
                cuts = {} if info.cut is None else {info.name: info.cut}
                values = join_parts({info.name: values}, cuts, self._parts, values.device)[info.name]
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
