"""The files of a DeepSpeed checkpoint, unpickled by torch's restricted unpickler and an explicit list of classes.

A pickle names the classes and functions it wants called. Only those of plain tensors and containers, and stand-ins for
the few classes of DeepSpeed's that hold numbers, are given to it; a file that names anything else is refused.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.errors import CheckpointError, listing
from engine.checkpoint.folder import LATEST

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_NOT_READ = {
    "a pipeline's (layer_* files)": re.compile(r"layer_\d+-.*\.pt"),
    "a mixture of experts (expert files)": re.compile(r".*expert_\d+.*\.pt"),
    "a universal checkpoint (a zero folder)": re.compile(r"zero"),
}


class LossScaler:
    """Stands in for ``deepspeed.runtime.fp16.loss_scaler``: its attributes and nothing else."""


class Address:
    """Stands in for ``deepspeed.utils.tensor_fragment.fragment_address``."""


def _stage(number: int) -> int:
    """Stands in for the enumeration of ZeRO stages."""
    return int(number)


ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Address, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (argparse.Namespace, "argparse.Namespace"),
]
"""What a file may name beside torch's own list (https://docs.pytorch.org/docs/stable/notes/serialization.html)."""


@dataclass(frozen=True)
class SavedFiles:
    """A checkpoint's contents as they were pickled. ``models``: rank 0's alone up to stage 2, else one a rank;
    ``optimizers``: one a rank, none at stage 0. Tensors are mapped from the files, not in memory."""

    path: Path
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]


def find_checkpoint(path: str | os.PathLike[str], tag: str | None) -> Path:
    """The folder that holds the .pt files: ``path`` itself, ``path/tag``, or what ``path/latest`` names."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no folder.")
    if tag is None and (directory / LATEST).is_file():
        tag = (directory / LATEST).read_text().strip()
    found = directory if tag is None else directory / tag
    there = sorted(entry.name for entry in directory.iterdir())
    if not found.is_dir() or found.resolve().parent not in (directory.resolve(), directory.resolve().parent):
        raise CheckpointError(f"{directory} lacks the checkpoint {tag!r}; it holds: {listing(there) or 'nothing'}.")
    if not any(_MODEL_FILE.fullmatch(entry.name) for entry in found.iterdir()):
        here = listing(sorted(entry.name for entry in found.iterdir())) or "nothing"
        raise CheckpointError(
            f"{found} is no DeepSpeed checkpoint: it has no mp_rank_00_model_states.pt. It holds: {here}. Name the "
            "folder that has the file 'latest', or the one of a tag."
        )
    return found


def read_files(folder: Path) -> SavedFiles:
    """Unpickle every file of the checkpoint in ``folder``. Raises `CheckpointError`, naming the file, for one that is
    missing, damaged, of another kind of parallelism, or that names a class outside the list."""
    names = sorted(os.listdir(folder))
    for what, pattern in _NOT_READ.items():
        if any(pattern.fullmatch(name) for name in names):
            raise CheckpointError(f"{folder} is {what}: only data-parallel checkpoints of ZeRO 0 to 3 are read.")
    models, optimizers = (_by_rank(folder, names, pattern) for pattern in (_MODEL_FILE, _OPTIMIZER_FILE))
    for rank in range(max(len(models), len(optimizers))):
        # up to stage 2 one rank writes the model for all
        if (optimizers and rank not in optimizers) or (len(models) > 1 and rank not in models):
            raise CheckpointError(f"{folder}: a file of rank {rank} is missing; it holds: {listing(names)}.")
    return SavedFiles(
        folder,
        [read_file(folder / models[rank]) for rank in sorted(models)],
        [read_file(folder / optimizers[rank]) for rank in sorted(optimizers)],
    )


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise CheckpointError(f"{folder} was trained with tensor parallelism ({name}): only data parallel is read.")
        found[int(match[1] or 0)] = name
    return found


def read_file(path: Path) -> dict[str, Any]:
    """One .pt file. Tensors are mapped from it. Raises `CheckpointError`."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            strangers = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            if strangers:
                raise CheckpointError(
                    f"{path} names {listing(sorted(strangers))}, which a DeepSpeed checkpoint does not need: it was "
                    "not read. If you put such objects into client_state yourself, save them as plain values."
                )
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError, KeyError, TypeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {first_line}") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not what DeepSpeed saves.")
    return dict(content)
