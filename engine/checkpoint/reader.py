"""Read a checkpoint in one process, tensor by tensor: without a process group, a model or a config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import torch

from engine.checkpoint import folder
from engine.checkpoint.dtypes import DTYPE_OF_CODE
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.manifest_reader import read
from engine.checkpoint.tensor_file import TensorFile

_MAX_OPEN_FILES = 64
RUN_CHECKPOINTS = "checkpoints"
"""Where `ptrain` keeps a run's checkpoints, inside its output folder."""


def open_checkpoint(path: str | os.PathLike[str], tag: str | int | None = None, verify: bool = True) -> Manifest:
    """The manifest of the checkpoint that ``path`` means.

    ``path``: the folder of one checkpoint, a folder of checkpoints (``tag``, or `latest`'s), or the output of a run.
    Raises `CheckpointError` where there is none, listing what is there.
    """
    directory = Path(path)
    if tag is None and (directory / folder.MANIFEST).is_file():
        directory = directory.resolve()
        directory, tag = directory.parent, directory.name
    elif not (directory / folder.LATEST).is_file() and (directory / RUN_CHECKPOINTS).is_dir():
        directory = directory / RUN_CHECKPOINTS
    manifest = read(directory, tag, verify)
    if manifest is None:
        raise CheckpointError(f"{directory} is missing or empty: there is no checkpoint to read.")
    return manifest


class CheckpointReader:
    """Whole tensors of one checkpoint. Use as a context manager: the files stay open in between."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files: dict[str, TensorFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.__exit__()
        self._files.clear()

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensor ``name`` ("parameters.NAME"), whole, on the CPU, in ``dtype`` (None: as stored).

        Raises `CheckpointError` where it is not there, or holds values that ``dtype`` cannot.
        """
        stored = self.manifest.resolve(name)
        if stored is None:
            raise CheckpointError(f"{self.manifest.path} holds no {name}.")
        saved = self.manifest.tensors[stored]
        whole = torch.empty(saved.shape, dtype=dtype or DTYPE_OF_CODE[saved.dtype])
        for piece in saved.pieces:
            file = self._file(piece.file)
            found = file.tensors.get(piece.key)
            if found is None or (found.dtype, found.shape) != (DTYPE_OF_CODE[saved.dtype], piece.box[1]):
                raise CheckpointError(f"{file.path}: {piece.key!r} is not in it as the manifest says.")
            target = whole
            for dimension, (offset, size) in enumerate(zip(*piece.box, strict=True)):
                target = target.narrow(dimension, offset, size)
            try:
                file.read(piece.key, ((0,) * len(piece.box[1]), piece.box[1]), target)
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from None
        return whole

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if len(self._files) == _MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).__exit__()
            self._files[name] = TensorFile(self.manifest.path / name)
        return self._files[name]
