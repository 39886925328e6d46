"""Weights as others read them: one safetensors file, or shards of it with Hugging Face's index, or torch's own format.

Tensors come one at a time, so that no more than one is in memory (torch's format needs a whole shard).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import folder
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.tensor_file import write_tensor_file

SAFETENSORS = ".safetensors"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KIB|MIB|GIB|TIB)?", re.IGNORECASE)
_UNITS = {"B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Weight:
    """A tensor that is made when its bytes are written: as much of a tensor as the writer of files needs."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def detach(self) -> torch.Tensor:
        return self.make()

    @property
    def num_bytes(self) -> int:
        return self.numel() * self.element_size()


def in_order(weights: Sequence[Weight]) -> list[Weight]:
    """The order in which `write_weights` asks for the tensors of one file."""
    return sorted(weights, key=lambda weight: -weight.element_size())


def parse_size(text: str | int) -> int:
    """Bytes of "5GB", "500 MiB" or a number. Raises `CheckpointError`."""
    match = _SIZE.fullmatch(str(text).strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "B").upper()]) if match else 0
    if size < 1:
        raise CheckpointError(f"{text!r} is no size; write a number of bytes, or one with KB, MB, GB, KiB, MiB, GiB.")
    return size


def write_weights(target: Path, weights: Sequence[Weight], max_shard_bytes: int | None = None) -> list[Path]:
    """Write ``weights`` to the file ``target``; where they exceed ``max_shard_bytes``, to shards beside it.

    ``model.safetensors`` becomes ``model-00001-of-00003.safetensors`` ... and ``model.safetensors.index.json``, the
    names that Hugging Face looks for. The suffix chooses the format: .safetensors, or torch's (.bin, .pt, .pth). Files
    appear under their names when all are written; those of an earlier export under the same name are deleted, for
    readers would prefer them. Returns the files.
    """
    if target.suffix not in (SAFETENSORS, *_TORCH_SUFFIXES):
        raise CheckpointError(f"{target}: weights are written as {', '.join((SAFETENSORS, *_TORCH_SUFFIXES))} files.")
    shards = _shards(weights, max_shard_bytes)
    names = [target.name]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        names = [f"{target.stem}-{number:05d}-of-{len(shards):05d}{target.suffix}" for number in numbers]
    os.makedirs(target.parent, exist_ok=True)
    written: dict[Path, Path] = {}
    try:
        for name, shard in zip(names, shards, strict=True):
            partial = folder.work_path(target.parent, name, "partial")
            written[target.parent / name] = partial
            _write(partial, shard, target.suffix)
        if len(shards) > 1:
            index = target.parent / f"{target.name}.index.json"
            written[index] = folder.work_path(target.parent, index.name, "partial")
            folder.write_synced(written[index], _index(names, shards))
        for final, partial in written.items():
            os.replace(partial, final)
    finally:
        for partial in written.values():
            partial.unlink(missing_ok=True)
    for stale in _family(target) - set(written):
        stale.unlink()
    folder.sync(target.parent)
    return list(written)


def _write(path: Path, weights: Sequence[Weight], suffix: str) -> None:
    if suffix == SAFETENSORS:
        write_tensor_file(path, [(weight.name, weight) for weight in weights])
        return
    with open(path, "xb") as file:
        torch.save({weight.name: weight.make() for weight in in_order(weights)}, file)
        file.flush()
        os.fsync(file.fileno())


def _shards(weights: Sequence[Weight], max_bytes: int | None) -> list[list[Weight]]:
    """Runs of at most ``max_bytes``; a larger tensor has a file of its own."""
    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and max_bytes is not None and filled + weight.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.num_bytes
    return shards


def _index(names: Sequence[str], shards: Sequence[Sequence[Weight]]) -> bytes:
    sizes = {"total_size": sum(weight.num_bytes for shard in shards for weight in shard)}
    places = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
    return (json.dumps({"metadata": sizes, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n").encode()


def _family(target: Path) -> set[Path]:
    """The files that an export to ``target`` may have written."""
    shard = re.compile(rf"{re.escape(target.stem)}-\d{{5}}-of-\d{{5}}{re.escape(target.suffix)}")
    found = {target, target.parent / f"{target.name}.index.json"}
    with suppress(FileNotFoundError):
        found |= {target.parent / name for name in os.listdir(target.parent) if shard.fullmatch(name)}
    return {path for path in found if path.exists()}
