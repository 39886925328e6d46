"""Text and token files as blocks for next-token prediction: the ``data`` section's ``path`` and ``sequence_length``.

`open_text` takes

* nothing: the Python standard library's own source, which every machine has. The ``*.py`` files under
  ``sysconfig.get_paths()["stdlib"]``, without installed packages and without test folders (left out because they are
  half of the bytes and would only cost start-up time);
* a text file: its bytes, memory-mapped;
* a folder: the bytes of every text file under it. Hidden files and folders, links to folders, files that are not
  regular, empty files, ``.bin`` files, and files with a zero byte in their first 8 KiB (Git's test for binary
  files) are left out;
* a ``.bin`` file: token ids, little-endian, memory-mapped. They are uint16, or uint32 when the name ends in
  ``.u32.bin``, unless a sidecar beside it (``corpus.bin`` -> ``corpus.json``) says otherwise:
  ``{"dtype": "uint16" | "uint32", "vocabulary_size": 50257}``, both keys optional.

Text becomes one token per byte (vocabulary 256). One file is split by position, its tail is held out; many files are
split by file: the held-out files are those whose relative paths hash lowest, so the split depends on the names alone,
not on the order in which a file system lists them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.contracts import EngineError
from engine.data.tokens import (
    MappedTokens,
    TokenBlocks,
    Tokens,
    bigram_entropy,
    check_vocabulary,
    largest_token,
)

__all__ = ["BYTE_VOCABULARY_SIZE", "TextCorpus", "TokenBlocks", "bigram_entropy", "open_text"]

BYTE_VOCABULARY_SIZE = 256
_TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class TextCorpus:
    """``source`` names what was read; ``is_text`` says that tokens are bytes. ``vocabulary_size``: 256 for text; of a
    token file the sidecar's, else the one that was asked for, else the largest id plus one."""

    train: TokenBlocks
    validation: TokenBlocks
    vocabulary_size: int
    source: str
    is_text: bool
    num_files: int


def open_text(
    path: str | None,
    sequence_length: int,
    validation_fraction: float = 0.1,
    vocabulary_size: int | None = None,
) -> TextCorpus:
    """Read the corpus at ``path`` (None: the standard library's source; see the module) and split it.

    ``validation_fraction`` of the files (of the tokens, for a single file) is held out. With ``vocabulary_size``, the
    model's, every token id is checked against it.

    Raises EngineError for a missing or unreadable path, a folder without text, an empty file, a part shorter than one
    block of ``sequence_length + 1`` tokens, a broken sidecar, and a token id outside the vocabulary.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise EngineError(f"data.validation_fraction is {validation_fraction}: it must lie between 0 and 1.")
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        names = sorted(_standard_library_files(folder))
        if not names:
            raise EngineError(f"data.path is not set and {folder} holds no Python source: set data.path to a text.")
        return _open_files(
            folder, names, "the Python standard library", sequence_length, validation_fraction, vocabulary_size
        )
    if not path:
        raise EngineError("data.path is empty: name a file or folder, or leave it out for the standard library.")
    place = Path(path).expanduser()
    try:
        mode = place.stat().st_mode
    except OSError as error:
        raise EngineError(f"data.path: {place} cannot be read: {_reason(error)}.") from error
    if stat.S_ISDIR(mode):
        names = sorted(_text_files(place))
        if not names:
            raise EngineError(f"data.path: {place} holds no text file (hidden, empty and binary ones do not count).")
        return _open_files(place, names, str(place), sequence_length, validation_fraction, vocabulary_size)
    if not stat.S_ISREG(mode):
        raise EngineError(f"data.path: {place} is neither a file nor a folder.")
    if place.name.endswith(".bin"):
        return _open_token_file(place, sequence_length, validation_fraction, vocabulary_size)
    train, validation = _map_split(place, np.dtype(np.uint8), validation_fraction)
    if vocabulary_size is not None:
        check_vocabulary(train, vocabulary_size, str(place))
        check_vocabulary(validation, vocabulary_size, str(place), first_position=len(train))
    return _corpus(train, validation, sequence_length, BYTE_VOCABULARY_SIZE, str(place), is_text=True, num_files=1)


def _standard_library_files(folder: Path) -> Iterator[str]:
    for name in _walk(folder, _NOT_STANDARD_LIBRARY):
        if name.endswith(".py") and (folder / name).is_file():
            yield name


def _text_files(folder: Path) -> Iterator[str]:
    for name in _walk(folder, frozenset()):
        if any(part.startswith(".") for part in name.split("/")) or name.endswith(".bin"):
            continue
        if not (folder / name).is_file():
            continue
        try:
            with open(folder / name, "rb") as file:
                head = file.read(8192)
        except OSError as error:
            raise EngineError(f"data.path: {folder / name} cannot be read: {_reason(error)}.") from error
        if head and b"\0" not in head:
            yield name


def _walk(folder: Path, left_out: frozenset[str]) -> Iterator[str]:
    """Relative paths of all files, with forward slashes on every system."""

    def refuse(error: OSError) -> None:
        raise EngineError(f"data.path: {error.filename} cannot be read: {_reason(error)}.") from error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in left_out]
        for name in files:
            yield Path(parent, name).relative_to(folder).as_posix()


def _open_files(
    folder: Path,
    names: Sequence[str],
    source: str,
    sequence_length: int,
    validation_fraction: float,
    vocabulary_size: int | None,
) -> TextCorpus:
    if len(names) == 1:
        return open_text(str(folder / names[0]), sequence_length, validation_fraction, vocabulary_size)
    by_hash = sorted(names, key=lambda name: hashlib.blake2b(name.encode("utf-8", "surrogateescape")).digest())
    num_held_out = min(max(1, round(len(names) * validation_fraction)), len(names) - 1)
    held_out = frozenset(by_hash[:num_held_out])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name in names:
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise EngineError(f"data.path: {folder / name} cannot be read: {_reason(error)}.") from error
        if vocabulary_size is not None and content:
            check_vocabulary(np.frombuffer(content, np.uint8), vocabulary_size, str(folder / name))
        parts[name in held_out].append(content)
    train, validation = (np.frombuffer(b"\n".join(parts[part]), np.uint8) for part in (False, True))
    return _corpus(train, validation, sequence_length, BYTE_VOCABULARY_SIZE, source, is_text=True, num_files=len(names))


def _open_token_file(
    path: Path, sequence_length: int, validation_fraction: float, vocabulary_size: int | None
) -> TextCorpus:
    dtype, declared = _read_sidecar(path)
    train, validation = _map_split(path, dtype, validation_fraction)
    for limit in {size for size in (declared, vocabulary_size) if size is not None}:
        check_vocabulary(train, limit, str(path))
        check_vocabulary(validation, limit, str(path), first_position=len(train))
    size = declared or vocabulary_size or 1 + max(largest_token(train), largest_token(validation))
    return _corpus(train, validation, sequence_length, size, str(path), is_text=False, num_files=1)


def _read_sidecar(path: Path) -> tuple[np.dtype[Any], int | None]:
    dtype_name = "uint32" if path.name.endswith(".u32.bin") else "uint16"
    sidecar = path.with_suffix(".json")
    if not sidecar.exists():
        return _TOKEN_DTYPES[dtype_name], None
    try:
        record = json.loads(sidecar.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{sidecar}: the description of {path.name} cannot be read: {error}.") from error
    allowed = 'allowed: {"dtype": "uint16" or "uint32", "vocabulary_size": an integer above 0}'
    if not isinstance(record, dict) or not record.keys() <= {"dtype", "vocabulary_size"}:
        raise EngineError(f"{sidecar}: not a description of {path.name}; {allowed}.")
    dtype_name, size = record.get("dtype", dtype_name), record.get("vocabulary_size")
    if dtype_name not in _TOKEN_DTYPES:
        raise EngineError(f"{sidecar}: dtype is {dtype_name!r}; {allowed}.")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise EngineError(f"{sidecar}: vocabulary_size is {size!r}; {allowed}.")
    return _TOKEN_DTYPES[dtype_name], size


def _map_split(path: Path, dtype: np.dtype[Any], validation_fraction: float) -> tuple[Tokens, Tokens]:
    """The file's head and its tail of ``validation_fraction``, as two memory maps of ``dtype``."""
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise EngineError(f"data.path: {path} is empty.")
    if size_bytes % dtype.itemsize:
        raise EngineError(
            f"data.path: {path} has {size_bytes} bytes, which is no multiple of {dtype.itemsize} ({dtype.name} token "
            f"ids): it is cut off, or of another dtype (name it in {path.with_suffix('.json').name})."
        )
    num_tokens = size_bytes // dtype.itemsize
    num_train = num_tokens - max(1, round(num_tokens * validation_fraction))
    try:
        return (
            MappedTokens(path, dtype.str, 0, num_train).open() if num_train else np.empty(0, dtype),
            MappedTokens(path, dtype.str, num_train * dtype.itemsize, num_tokens - num_train).open(),
        )
    except OSError as error:
        raise EngineError(f"data.path: {path} cannot be read: {_reason(error)}.") from error


def _corpus(
    train: Tokens,
    validation: Tokens,
    sequence_length: int,
    vocabulary_size: int,
    source: str,
    *,
    is_text: bool,
    num_files: int,
) -> TextCorpus:
    blocks = TokenBlocks(train, sequence_length), TokenBlocks(validation, sequence_length)
    for name, part in zip(("training", "validation"), blocks, strict=True):
        if not len(part):
            raise EngineError(
                f"{source}: the {name} part has {len(part.tokens)} tokens, one block needs {sequence_length + 1} "
                f"(data.sequence_length + 1): use more text or a shorter data.sequence_length."
            )
    return TextCorpus(*blocks, vocabulary_size, source, is_text, num_files)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
