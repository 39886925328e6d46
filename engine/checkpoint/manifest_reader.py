"""Read a manifest and believe none of it: every type, name, size and box is checked before anything acts on it."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from engine.checkpoint import folder
from engine.checkpoint.boxes import Box, inside, partition_fault, show
from engine.checkpoint.dtypes import DTYPE_OF_CODE
from engine.checkpoint.errors import CheckpointError, listing
from engine.checkpoint.exchange import Exchange, exchange_of
from engine.checkpoint.json_values import decode
from engine.checkpoint.manifest import (
    CLIENT_STATE,
    FORMAT,
    FORMAT_VERSION,
    Manifest,
    Piece,
    SavedState,
    SavedTensor,
    content_hash,
)
from engine.checkpoint.tensor_file import FileRecord
from engine.contracts import OnLayoutChange, SavedLayout
from engine.plan.placement import AXES_OF

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FILE_NAME = re.compile(r"rank_[0-9]{5,}\.safetensors")
_HASH = re.compile(r"[0-9a-f]{32}")
_MAX_MANIFEST_BYTES = 1 << 30
_MAX_ELEMENTS = 1 << 62
_MAX_PIECES = 1 << 14
"""Of one tensor: several for each of thousands of ranks. Comparing them takes time that grows with the square."""


def read_manifest(
    directory: str | os.PathLike[str],
    tag: str | int | None = None,
    *,
    verify: bool = True,
    rank: int = 0,
    world_size: int = 1,
    group: ProcessGroup | Exchange | None = None,
) -> Manifest | None:
    """The manifest of checkpoint ``tag`` (None: the one that `latest` names); collective when ``world_size`` > 1.

    None where the directory is missing or empty. Raises `CheckpointError`, the same on every rank, where it holds
    something else than this checkpoint, and where a file of it is missing, foreign, cut short or (``verify``) where the
    manifest itself was changed. Tensor bytes are not looked at.
    """
    exchange = exchange_of(group, rank, world_size)
    return exchange.on_first(
        lambda: read(Path(directory), tag, verify), f"Reading a checkpoint in {os.fspath(directory)}"
    )


def read(directory: Path, tag: str | int | None, verify: bool) -> Manifest | None:
    """`read_manifest` on this rank alone."""
    found = folder.find(directory, None if tag is None else folder.check_tag(tag))
    if found is None:
        return None
    name, path = found
    manifest = parse_manifest((path / folder.MANIFEST), verify)
    if manifest.tag != name:
        raise CheckpointError(
            f"{path} holds the checkpoint {manifest.tag!r}: it was renamed. Rename it back or copy it."
        )
    check_files(manifest)
    return manifest


def check_files(manifest: Manifest) -> None:
    """Raise `CheckpointError`, naming them, where files are missing, foreign or of another size than was written."""
    faults = []
    for record in manifest.files.values():
        try:
            found = os.lstat(manifest.path / record.name)
        except OSError as error:
            faults.append(f"{record.name} is missing" if isinstance(error, FileNotFoundError) else str(error))
            continue
        if not stat.S_ISREG(found.st_mode):  # a link may lead anywhere, and a pipe has no end
            faults.append(f"{record.name} is not a regular file")
        elif found.st_size != record.size_bytes:
            faults.append(f"{record.name} has {found.st_size} bytes where {record.size_bytes} were written")
    present = {name for name in os.listdir(manifest.path) if FILE_NAME.fullmatch(name)}
    faults += [f"{name} does not belong to it" for name in sorted(present - set(manifest.files))]
    if faults:
        raise CheckpointError(f"{manifest.path} cannot be loaded: {listing(faults)}.")


def parse_manifest(path: Path, verify: bool = True) -> Manifest:
    """The manifest in the file ``path``. Raises `CheckpointError` that says what in it is wrong."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is no manifest: not a regular file of at most {_MAX_MANIFEST_BYTES} bytes.")
        content = json.loads(path.read_bytes(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    reader = _Reader(str(path))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f'{path} is not a checkpoint\'s manifest: it lacks "format": "{FORMAT}".')
    if reader.integer(content.get("format_version"), "format_version") > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {content['format_version']}; this engine reads up to {FORMAT_VERSION}. "
            "Load it with the newer engine that wrote it."
        )
    if verify and content.get("sha256") != content_hash(content):
        raise CheckpointError(f"{path} was changed after it was written: its sha256 does not match its content.")
    return replace(reader.manifest(content), path=path.parent)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


class _Reader:
    """Typed access to parsed JSON. Every method returns a value of its type or raises, naming where it stands."""

    def __init__(self, path: str) -> None:
        self._path = path

    def fail(self, where: str, found: Any, allowed: str) -> CheckpointError:
        shown = repr(found)
        return CheckpointError(
            f"{self._path}: {where} is {shown[:100]}{'...' if len(shown) > 100 else ''}; allowed: {allowed}. "
            "The manifest is damaged or was not written by this engine."
        )

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(where, value, "an object")
        return value

    def sequence(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.fail(where, value, "a list")
        return value

    def string(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise self.fail(where, value, "a string")
        return value

    def integer(self, value: Any, where: str) -> int:
        if type(value) is not int or not 0 <= value <= _MAX_ELEMENTS:
            raise self.fail(where, value, "an integer from 0 up")
        return value

    def integers(self, value: Any, where: str) -> tuple[int, ...]:
        return tuple(self.integer(item, where) for item in self.sequence(value, where))

    def strings(self, value: Any, where: str) -> dict[str, str]:
        return {key: self.string(item, f"{where}.{key}") for key, item in self.mapping(value, where).items()}

    def manifest(self, content: dict[str, Any]) -> Manifest:
        files = {name: self.file(name, record) for name, record in self.mapping(content.get("files"), "files").items()}
        tensors = {
            name: self.tensor(f"tensors.{name}", record, files)
            for name, record in self.mapping(content.get("tensors"), "tensors").items()
        }
        self.check_sizes(tensors, files)
        layout = self.layout(content.get("layout"))
        return Manifest(
            tag=folder.check_tag(self.string(content.get("tag"), "tag")),
            tensors=tensors,
            files=files,
            aliases=self.strings(content.get("aliases"), "aliases"),
            states={
                name: self.state(f"states.{name}", record, layout.world_size)
                for name, record in self.mapping(content.get("states"), "states").items()
            },
            encoded_client_state=content.get(CLIENT_STATE),
            config=self.mapping(decode(content.get("config"), "config"), "config"),
            counters=self.mapping(decode(content.get("counters"), "counters"), "counters"),
            layout=layout,
            metric=self.metric(content.get("metric")),
            versions=self.strings(content.get("versions"), "versions"),
        )

    def metric(self, value: Any) -> float | None:
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise self.fail("metric", value, "a number or null")
        return value

    def file(self, name: str, record: Any) -> FileRecord:
        if not FILE_NAME.fullmatch(name):
            raise self.fail("a name in files", name, "rank_NNNNN.safetensors, inside the checkpoint's own folder")
        fields = self.mapping(record, f"files.{name}")
        digest = self.string(fields.get("xxh3_128"), f"files.{name}.xxh3_128")
        if not _HASH.fullmatch(digest):
            raise self.fail(f"files.{name}.xxh3_128", digest, "32 hexadecimal digits")
        return FileRecord(name, self.integer(fields.get("size_bytes"), f"files.{name}.size_bytes"), digest)

    def tensor(self, where: str, record: Any, files: Mapping[str, FileRecord]) -> SavedTensor:
        fields = self.mapping(record, where)
        shape = self.integers(fields.get("shape"), f"{where}.shape")
        dtype = self.string(fields.get("dtype"), f"{where}.dtype")
        if dtype not in DTYPE_OF_CODE:
            raise self.fail(f"{where}.dtype", dtype, ", ".join(DTYPE_OF_CODE))
        if prod(shape) > _MAX_ELEMENTS:
            raise self.fail(f"{where}.shape", shape, f"at most {_MAX_ELEMENTS} elements")
        if len(self.sequence(fields.get("pieces"), f"{where}.pieces")) > _MAX_PIECES:
            raise self.fail(f"the number of {where}.pieces", len(fields["pieces"]), f"at most {_MAX_PIECES}")
        pieces = tuple(
            self.piece(f"{where}.pieces[{i}]", piece, shape, files) for i, piece in enumerate(fields["pieces"])
        )
        fault = partition_fault(shape, [piece.box for piece in pieces])
        if fault is not None:
            raise CheckpointError(f"{self._path}: {where}: {fault}. The checkpoint is not whole.")
        return SavedTensor(shape, dtype, pieces)

    def piece(self, where: str, record: Any, shape: tuple[int, ...], files: Mapping[str, FileRecord]) -> Piece:
        fields = self.sequence(record, where)
        if len(fields) != 4:
            raise self.fail(where, record, "[file, key, offsets, sizes]")
        file, key = self.string(fields[0], where), self.string(fields[1], where)
        if file not in files:
            raise self.fail(where, file, "a file that the manifest lists")
        box: Box = self.integers(fields[2], where), self.integers(fields[3], where)
        if not inside(box, shape) or 0 in box[1]:
            raise self.fail(where, record, f"a non-empty box inside a tensor of shape {list(shape)}")
        return Piece(file, key, box)

    def check_sizes(self, tensors: Mapping[str, SavedTensor], files: Mapping[str, FileRecord]) -> None:
        """No file is said to hold more bytes than it has: nobody allocates what a manifest only claims."""
        claimed = dict.fromkeys(files, 0)
        for name, tensor in tensors.items():
            for piece in tensor.pieces:
                claimed[piece.file] += prod(piece.box[1]) * DTYPE_OF_CODE[tensor.dtype].itemsize
                if claimed[piece.file] > files[piece.file].size_bytes:
                    raise self.fail(f"tensors.{name}", show(piece.box), f"no more bytes than {piece.file} has")

    def state(self, where: str, record: Any, world_size: int) -> SavedState:
        fields = self.mapping(record, where)
        allowed = get_args(OnLayoutChange)
        policy = self.string(fields.get("on_layout_change"), f"{where}.on_layout_change")
        if policy not in allowed:
            raise self.fail(f"{where}.on_layout_change", policy, ", ".join(allowed))
        values = self.sequence(fields.get("values"), f"{where}.values")
        if len(values) not in (1, world_size):
            raise self.fail(f"{where}.values", values, f"1 value or {world_size}, one a rank")
        return SavedState(policy, tuple(values))  # type: ignore[arg-type]  # checked above

    def placement(self, record: Any) -> str:
        placement = self.string(record, "layout.placement")
        if sorted(placement) != sorted(AXES_OF):
            raise self.fail("layout.placement", placement, f"the letters {', '.join(AXES_OF)} in any order")
        return placement

    def layout(self, record: Any) -> SavedLayout:
        fields = self.mapping(record, "layout")
        mesh = self.mapping(fields.get("mesh"), "layout.mesh")
        return SavedLayout(
            world_size=self.integer(fields.get("world_size"), "layout.world_size"),
            zero_stage=self.integer(fields.get("zero_stage"), "layout.zero_stage"),
            mesh={axis: self.integer(size, f"layout.mesh.{axis}") for axis, size in mesh.items()},
            global_batch_size=self.integer(fields.get("global_batch_size"), "layout.global_batch_size"),
            placement=self.placement(fields.get("placement", "PDT")),
        )
