"""safetensors files written as a stream and read in parts.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, a JSON header, the tensors' bytes.
The library's own writer wants contiguous copies of everything and its reader maps whole files; this one writes views
block by block while it hashes them, and reads only the rows of a box, so a save or load adds a few blocks of memory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from engine.checkpoint.boxes import Box
from engine.checkpoint.dtypes import CODE_OF_DTYPE, DTYPE_OF_CODE, assign
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.synced_file import SyncedFile

BLOCK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MIN_RUN_BYTES = 64 << 10
_AHEAD_BYTES = 64 << 20


@dataclass(frozen=True)
class FileRecord:
    """A tensor file as it was written: its name inside the checkpoint's folder, its size, its hash (hexadecimal)."""

    name: str
    size_bytes: int
    xxh3_128: str


# --- writing -----------------------------------------------------------------------------------------------


class Writable(Protocol):
    """What is written as a tensor: one, or something that makes it when its bytes are due."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...
    def detach(self) -> torch.Tensor: ...


def write_tensor_file(path: Path, tensors: Sequence[tuple[str, Writable]]) -> FileRecord:
    """Write ``(key, tensor)`` pairs to the new file ``path``, synced to disk. Tensors may be views, on any device."""
    # Wide elements first keeps every tensor aligned for readers that map the file.
    ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        code = CODE_OF_DTYPE[tensor.dtype]
        header[key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path.name}: {len(ordered)} tensors make a header larger than safetensors allows.")
    size_bytes = 8 + len(encoded) + end
    with SyncedFile(path, size_bytes) as file:
        file.write(memoryview(len(encoded).to_bytes(8, "little") + encoded))
        for _, tensor in ordered:
            for block in _blocks(tensor.detach()):
                file.write(block)
    return FileRecord(path.name, size_bytes, file.xxh3_128)


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of ``tensor`` in row-major order, at most about `BLOCK_BYTES` at a time."""
    if tensor.numel() == 0:
        return
    num_elements = max(BLOCK_BYTES // tensor.element_size(), 1)
    if tensor.is_contiguous():
        for part in tensor.reshape(-1).split(num_elements):
            yield _bytes_of(part.resolve_conj().resolve_neg().cpu())
    elif tensor.numel() <= num_elements:
        yield _bytes_of(tensor.resolve_conj().resolve_neg().cpu().contiguous())
    else:
        row_elements = tensor.numel() // tensor.shape[0]
        for rows in tensor.split(max(num_elements // row_elements, 1)):
            yield from _blocks(rows[0] if len(rows) == 1 else rows)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# --- reading -----------------------------------------------------------------------------------------------


def hash_of(path: Path) -> str:
    """XXH3, 128 bits (https://github.com/Cyan4973/xxHash): finds accidents, at the speed of memory; no forgeries."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    position = 0
    with open(path, "rb", buffering=0) as file:
        while True:
            if hasattr(os, "posix_fadvise"):  # the kernel's own read-ahead is too short to keep a disk busy
                os.posix_fadvise(file.fileno(), position, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            num_bytes = file.readinto(buffer)
            if not num_bytes:
                break
            digest.update(buffer[:num_bytes])
            position += num_bytes
    return digest.hexdigest()


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int


class TensorFile:
    """An open safetensors file. ``tensors`` maps its keys to where they are. Use as a context manager.

    Raises `CheckpointError` that names the file where the header is not what the format allows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._stage = torch.empty(0, dtype=torch.uint8)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise self._damaged("is not a regular file")
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by __exit__)
        except OSError as error:
            raise self._damaged(f"cannot be opened ({error.strerror})") from None
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def read(self, key: str, box: Box, destination: torch.Tensor) -> None:
        """Fill ``destination`` (any strides and device) with ``box`` of tensor ``key``, cast where dtypes differ."""
        stored = self.tensors[key]
        if destination.numel():
            with torch.no_grad():
                self._read_box(stored.start_bytes, stored.shape, stored.dtype, box, destination.detach())

    def _read_box(self, start: int, shape: tuple[int, ...], dtype: torch.dtype, box: Box, target: torch.Tensor) -> None:
        offsets, sizes = box
        if sizes[1:] == shape[1:]:
            first = start + (offsets[0] * prod(shape[1:]) * dtype.itemsize if shape else 0)
            self._read_run(first, dtype, target)
            return
        row_bytes = prod(shape[1:]) * dtype.itemsize
        first = start + offsets[0] * row_bytes
        if row_bytes > BLOCK_BYTES or sizes[1] * prod(shape[2:]) * dtype.itemsize >= _MIN_RUN_BYTES:
            for row in range(sizes[0]):
                self._read_box(first + row * row_bytes, shape[1:], dtype, (offsets[1:], sizes[1:]), target[row])
            return
        # Short parts of rows: whole rows in one read are cheaper than a system call for each part.
        num_rows = BLOCK_BYTES // row_bytes
        part = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
        for row in range(0, sizes[0], num_rows):
            rows = target.narrow(0, row, min(num_rows, sizes[0] - row))
            block = self._staged(first + row * row_bytes, (len(rows), *shape[1:]), dtype)
            self._assign(rows, block[:, *part])

    def _read_run(self, start: int, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Fill ``target`` with the consecutive elements that begin at byte ``start``."""
        if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self._read_into(start, _bytes_of(target))
        elif target.numel() * dtype.itemsize <= BLOCK_BYTES:
            self._assign(target, self._staged(start, tuple(target.shape), dtype))
        else:
            row_bytes = target.numel() // target.shape[0] * dtype.itemsize
            for rows in target.split(max(BLOCK_BYTES // row_bytes, 1)):
                self._read_run(start, dtype, rows[0] if len(rows) == 1 else rows)
                start += len(rows) * row_bytes

    def _assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        try:
            assign(target, source)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path.name}: {error}") from None

    def _staged(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        if self._stage.numel() < num_bytes:
            self._stage = torch.empty(num_bytes, dtype=torch.uint8)
        view = self._stage[:num_bytes]
        self._read_into(start, _bytes_of(view))
        return view.view(dtype).view(shape)

    def _read_into(self, start: int, buffer: memoryview) -> None:
        self._file.seek(start)
        self.bytes_read += buffer.nbytes
        while buffer:
            num_bytes = self._file.readinto(buffer)
            if not num_bytes:
                raise self._damaged("ends too early; it was truncated")
            buffer = buffer[num_bytes:]

    def _read_header(self) -> dict[str, StoredTensor]:
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise self._damaged(f"is not a safetensors file: {size} bytes")
        prefix = bytearray(8)
        self._read_into(0, memoryview(prefix))
        header_bytes = int.from_bytes(prefix, "little")
        if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise self._damaged(f"is not a safetensors file, or was truncated: its header has {header_bytes} bytes")
        encoded = bytearray(header_bytes)
        self._read_into(8, memoryview(encoded))
        try:
            header = json.loads(encoded)
        except (ValueError, RecursionError):
            raise self._damaged("is not a safetensors file: its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("is not a safetensors file: its header is not an object")
        header.pop("__metadata__", None)
        return {key: self._stored(key, entry, 8 + header_bytes, size) for key, entry in header.items()}

    def _stored(self, key: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
        match entry:
            case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
                code in DTYPE_OF_CODE and all(type(size) is int and size >= 0 for size in shape)
            ):
                dtype = DTYPE_OF_CODE[code]
                num_bytes = prod(shape) * dtype.itemsize
                if 0 <= start <= stop <= file_size - data_start and stop - start == num_bytes:
                    return StoredTensor(dtype, tuple(shape), data_start + start)
        raise self._damaged(f"has an impossible header entry for {key!r}, or was truncated")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}.")
