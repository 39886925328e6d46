"""Fill tensors from a checkpoint: any box of any saved tensor, whatever the layout it was saved under."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoint.boxes import Box, inside, intersect, relative, show
from engine.checkpoint.dtypes import DTYPE_OF_CODE, conversion, name_of
from engine.checkpoint.errors import CheckpointError, listing
from engine.checkpoint.exchange import Exchange, exchange_of
from engine.checkpoint.json_values import decode
from engine.checkpoint.manifest import CLIENT_STATE, Manifest, SavedTensor
from engine.checkpoint.manifest_reader import read
from engine.checkpoint.tensor_file import TensorFile, hash_of
from engine.contracts import Chunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LoadedTensors:
    """What a load did, over all ranks; names sorted.

    ``missing``: asked for and not in the checkpoint; their tensors were not touched. ``unexpected``: saved in a section
    that was asked for (``parameters``, ``optimizer``, ...) and asked for by no rank. ``converted``: name -> what the
    change of dtype did ("float32 rounded to bfloat16"). ``bytes_read``: by this rank, headers included, hashing not.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    converted: dict[str, str]
    restored_names: frozenset[str]
    bytes_read: int


@dataclass(frozen=True)
class _Read:
    """One read: ``box`` (in the piece's coordinates) of ``key`` goes into ``target``."""

    key: str
    box: Box
    target: torch.Tensor
    saved: SavedTensor
    piece_shape: tuple[int, ...]


@dataclass(frozen=True)
class _Wanted:
    """What one rank asked for, without tensors."""

    files: list[str]
    missing: list[str]
    restored: set[str]
    sections: set[str]
    converted: dict[str, str]


def load_tensors(
    directory: str | os.PathLike[str],
    tag: str | int | None,
    chunks: Sequence[Chunk],
    *,
    strict: bool | Collection[str] = True,
    verify: bool = True,
    rank: int = 0,
    world_size: int = 1,
    group: ProcessGroup | Exchange | None = None,
) -> LoadedTensors:
    """Fill every chunk's tensor in place from checkpoint ``tag`` (None: `latest`'s); all ranks call it.

    ``chunks``: the boxes that this rank needs; only their rows are read. A chunk's dtype may differ from the saved one:
    floats convert (noted), integers widen. ``strict``: missing and unexpected names are an error; a collection holds
    only those sections to it. ``verify``: first hash every file that is needed, each once, shared out over the ranks.

    Raises `CheckpointError`, the same on every rank: names missing, shapes or dtypes that do not fit, files missing,
    truncated or changed (named). All but a fault of the disk itself is found before any tensor is touched.
    """
    exchange = exchange_of(group, rank, world_size)
    doing = f"Loading {'the latest checkpoint' if tag is None else f'checkpoint {tag!r}'} from {os.fspath(directory)}"
    manifest = exchange.on_first(lambda: _manifest(Path(directory), tag, verify), doing)
    reads: defaultdict[str, list[_Read]] = defaultdict(list)
    wanted = exchange.collect(lambda: _plan(manifest, chunks, reads), doing)
    files, outcome = exchange.on_first(lambda: _agree(manifest, wanted or [], strict), doing)
    if verify:
        exchange.collect(lambda: _verify(manifest, files[exchange.rank :: exchange.world_size]), doing)
    exchange.collect(lambda: _check_headers(manifest, reads), doing)
    bytes_read: list[int] = []
    exchange.collect(lambda: bytes_read.append(_read(manifest, reads)), doing)
    return LoadedTensors(**outcome, bytes_read=bytes_read[0])


def load_client_state(manifest: Manifest) -> dict[str, Any]:
    """The client state as it was passed to the save; its tensors on the CPU. Each rank may call it alone."""

    def tensor(name: str) -> torch.Tensor:
        if name not in manifest.tensors or not name.startswith(f"{CLIENT_STATE}."):
            raise CheckpointError(
                f"{manifest.path}: client_state names the tensor {name!r}, which is not in the checkpoint."
            )
        filled = tensor_like_saved(manifest, name)
        reads: defaultdict[str, list[_Read]] = defaultdict(list)
        _plan(manifest, [Chunk.whole(name, filled)], reads)
        _check_headers(manifest, reads)
        _read(manifest, reads)
        return filled

    state = decode(manifest.encoded_client_state, CLIENT_STATE, tensor)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{manifest.path}: client_state is a {type(state).__name__} in the manifest, not an object."
        )
    return state


def tensor_like_saved(manifest: Manifest, name: str) -> torch.Tensor:
    """Memory on the CPU for the saved tensor ``name``. Raises `CheckpointError` where there is not enough."""
    saved = manifest.tensors[name]
    try:
        return torch.empty(saved.shape, dtype=DTYPE_OF_CODE[saved.dtype])
    except RuntimeError as error:  # sparse files claim any size
        raise CheckpointError(f"{manifest.path}: {name} of shape {list(saved.shape)}: {error}") from None


def verify_files(manifest: Manifest) -> None:
    """Hash every file of the checkpoint. Raises `CheckpointError` naming those that changed since they were written."""
    _verify(manifest, list(manifest.files))


def _manifest(directory: Path, tag: str | int | None, verify: bool) -> Manifest:
    manifest = read(directory, tag, verify)
    if manifest is None:
        raise CheckpointError(f"{directory} is missing or empty: there is no checkpoint to load.")
    return manifest


def _plan(manifest: Manifest, chunks: Sequence[Chunk], reads: dict[str, list[_Read]]) -> _Wanted:
    """Find every chunk's parts; ``reads`` gets them by file."""
    missing: list[str] = []
    restored: set[str] = set()
    converted: dict[str, str] = {}
    faults: list[str] = []
    for chunk in chunks:
        stored = manifest.resolve(chunk.name)
        if stored is None:
            missing.append(chunk.name)
            continue
        saved = manifest.tensors[stored]
        fault = _misfit(chunk, saved)
        if fault is not None:
            faults.append(fault)
            continue
        restored.add(stored)
        change = conversion(DTYPE_OF_CODE[saved.dtype], chunk.tensor.dtype)
        if change is not None:
            dtypes = name_of(DTYPE_OF_CODE[saved.dtype]), name_of(chunk.tensor.dtype)
            converted[chunk.name] = f"{dtypes[0]} {change} to {dtypes[1]}"
        box = chunk.offsets, chunk.sizes
        for piece in saved.pieces:
            common = intersect(box, piece.box)
            if common is not None:
                target = chunk.tensor.detach()
                for dimension, (offset, size) in enumerate(zip(*relative(common, chunk.offsets), strict=True)):
                    target = target.narrow(dimension, offset, size)
                part = _Read(piece.key, relative(common, piece.box[0]), target, saved, piece.box[1])
                reads[piece.file].append(part)
    if faults:
        raise CheckpointError(f"{listing(faults)}.")
    sections = {chunk.name.partition(".")[0] for chunk in chunks}
    return _Wanted(list(reads), missing, restored, sections, converted)


def _misfit(chunk: Chunk, saved: SavedTensor) -> str | None:
    if chunk.global_shape != saved.shape:
        return f"{chunk.name} has shape {list(chunk.global_shape)} here and {list(saved.shape)} in the checkpoint"
    if not inside((chunk.offsets, chunk.sizes), chunk.global_shape) or tuple(chunk.tensor.shape) != chunk.sizes:
        box = show((chunk.offsets, chunk.sizes))
        return f"{chunk.name}: a tensor of shape {list(chunk.tensor.shape)} for elements {box} of {list(saved.shape)}"
    if chunk.tensor.is_meta:
        return f"{chunk.name}: its tensor is on the meta device; materialise it before loading"
    try:
        conversion(DTYPE_OF_CODE[saved.dtype], chunk.tensor.dtype)
    except CheckpointError as error:
        return f"{chunk.name}: {error}"
    return None


def _agree(
    manifest: Manifest, wanted: Sequence[_Wanted], strict: bool | Collection[str]
) -> tuple[list[str], dict[str, Any]]:
    """Rank 0: the files to verify, largest first, and what is missing and unexpected over all ranks."""
    restored = {name for rank in wanted for name in rank.restored}
    sections = {section for rank in wanted for section in rank.sections}
    missing = sorted({name for rank in wanted for name in rank.missing})
    unexpected = sorted(
        name
        for name in manifest.tensors
        if name not in restored and name.partition(".")[0] in sections - {CLIENT_STATE}
    )
    held = sections if strict is True else set(strict or ())
    absent, extra = ([name for name in names if name.partition(".")[0] in held] for names in (missing, unexpected))
    if absent or extra:
        told = [f"not in the checkpoint: {listing(absent)}"] if absent else []
        told += [f"in the checkpoint and not asked for: {listing(extra)}"] if extra else []
        raise CheckpointError(f"{'; '.join(told)}. Load with load_module_strict=False to restore the rest.")
    needed = {name for rank in wanted for name in rank.files}
    files = sorted(needed, key=lambda name: (-manifest.files[name].size_bytes, name))
    converted = {name: change for rank in wanted for name, change in sorted(rank.converted.items())}
    outcome = {
        "missing": tuple(missing),
        "unexpected": tuple(unexpected),
        "converted": converted,
        "restored_names": frozenset(restored),
    }
    return files, outcome


def _verify(manifest: Manifest, names: Sequence[str]) -> None:
    changed = [name for name in names if hash_of(manifest.path / name) != manifest.files[name].xxh3_128]
    if changed:
        raise CheckpointError(
            f"in {manifest.path}, {listing(changed)} changed after being written: the hash is not the manifest's. "
            "Load another tag, or restore the file"
        )


def _check_headers(manifest: Manifest, reads: dict[str, list[_Read]]) -> None:
    """Before anything is read: every key is in its file, of the dtype and shape that the manifest says."""
    for name, parts in reads.items():
        with TensorFile(manifest.path / name) as file:
            for part in parts:
                stored = file.tensors.get(part.key)
                claimed = DTYPE_OF_CODE[part.saved.dtype], part.piece_shape
                if stored is None or (stored.dtype, stored.shape) != claimed:
                    raise CheckpointError(
                        f"{file.path}: {part.key!r} is not in it as the manifest says ({part.saved.dtype} "
                        f"{list(part.piece_shape)}); the file belongs to another checkpoint."
                    )


def _read(manifest: Manifest, reads: dict[str, list[_Read]]) -> int:
    bytes_read = 0
    for name, parts in reads.items():
        with TensorFile(manifest.path / name) as file:
            for part in sorted(parts, key=lambda part: file.tensors[part.key].start_bytes):
                file.read(part.key, part.box, part.target)
            bytes_read += file.bytes_read
    return bytes_read
