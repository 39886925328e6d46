"""A window's micro-batches as every stage has them: whole, placed, cut as the curriculum says."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.contracts import Curriculum, EngineError
from engine.data.batch import count_tokens, describe, place
from engine.torch_compat import tree_leaves, tree_map_tensors


@dataclass(frozen=True)
class MicroBatch:
    """``kind``: what the shapes of hidden states follow from. ``targets`` are for a ``loss_fn``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    kind: tuple[Any, ...]

    @property
    def num_tokens(self) -> int:
        return count_tokens((self.args, self.kwargs))

    @property
    def checksum(self) -> int:
        """Of the values: equal on ranks that have the same samples."""
        total = 0
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor) and leaf.numel():
                data = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)
                total = zlib.crc32(data.numpy().tobytes(), total)
        return total


class Placement:
    """From what a loader yields to `MicroBatch`es. ``pieces``: how many are cut from one of the loader's."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        curriculum: Curriculum,
        loss_fn: Callable[..., Any] | None,
        pieces: int,
        size: int,
    ) -> None:
        self._device, self._dtype, self._curriculum = device, dtype, curriculum
        self._has_targets, self._pieces, self._size = loss_fn is not None, pieces, size

    def training(self, batch: Any) -> Iterator[MicroBatch]:
        for piece in self._cut(batch):
            whole = self._curriculum.cut(piece) if self._has_targets else piece
            args, kwargs, targets = self._take_apart(whole)
            args, kwargs = place((args, kwargs), self._device, self._dtype)
            args, kwargs = self._curriculum.apply(args, kwargs)
            yield self._made(args, kwargs, targets)

    def evaluation(self, batch: Any) -> MicroBatch:
        args, kwargs, targets = self._take_apart(batch)
        args, kwargs = place((args, kwargs), self._device, self._dtype)
        return self._made(args, kwargs, targets)

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> MicroBatch:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kind = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
        return MicroBatch(args, kwargs, place(targets, self._device, None), (*kwargs, *kind))

    def _take_apart(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        inputs, targets = batch, None
        if self._has_targets:
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                raise EngineError(f"with a loss_fn a batch is (inputs, targets); the loader gave {describe(batch)}")
            inputs, targets = batch
        if isinstance(inputs, Mapping):
            return (), dict(inputs), targets
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}, targets

    def _cut(self, batch: Any) -> Iterator[Any]:
        """Equal pieces of every tensor along its first dimension where that counts samples."""
        if self._pieces == 1:
            yield batch
            return
        size = self._size // self._pieces
        first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
        if first is None or len(first) != self._size:
            raise EngineError(
                f"pipeline.micro_batches cuts micro-batches of {self._size} samples into {self._pieces}; this one is "
                f"{describe(batch)}" + ("" if first is None else f" of {len(first)}")
            )
        for index in range(self._pieces):

            def part(tensor: Tensor, start: int = index * size) -> Tensor:
                return tensor[start : start + size] if tensor.ndim and len(tensor) == self._size else tensor

            yield tree_map_tensors(part, batch)
