"""From a checkpoint to weights that plain PyTorch and Hugging Face load. One process, no model, no process group.

Parameters come from the masters (fp32 where training was 16-bit) under every name they have, so that the names are
those of the model's ``state_dict()``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.checkpoint.dtypes import DTYPE_OF_CODE, conversion
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.extra_state import SECTION, read_values
from engine.checkpoint.loading import verify_files
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.model_facts import frozen_names
from engine.checkpoint.reader import CheckpointReader, open_checkpoint
from engine.checkpoint.weight_files import SAFETENSORS, Weight, parse_size, write_weights

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "stored": None}
DEFAULT_SHARD_SIZE = "5GB"
_DIGITS = re.compile(r"(\d+)")


def export(
    checkpoint: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    tag: str | int | None = None,
    dtype: str = "fp32",
    max_shard_size: str | int | None = DEFAULT_SHARD_SIZE,
    exclude_frozen: bool = False,
    verify: bool = True,
) -> list[Path]:
    """Write the weights in ``checkpoint`` to ``to``: a .safetensors file, or a folder that gets ``model.safetensors``.

    ``checkpoint``: the folder of one checkpoint, a folder of checkpoints (``tag``, or `latest`'s), or a run's output.
    ``dtype``: of floating parameters; "stored" leaves them. A floating buffer is never rounded: it takes ``dtype``
    where that is wider. ``max_shard_size``: larger exports become shards with an index. At most one tensor is in
    memory. Returns the files. Raises `CheckpointError` for a checkpoint that cannot be read, and for values outside
    the range of ``dtype``.
    """
    if dtype not in EXPORT_DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is no dtype to export; allowed: {', '.join(EXPORT_DTYPES)}.")
    target = Path(to)
    if target.is_dir() or not target.suffix:
        target = target / f"model{SAFETENSORS}"
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    manifest = open_checkpoint(checkpoint, tag, verify)
    if verify:
        verify_files(manifest)
    with CheckpointReader(manifest) as reader:
        weights = [
            _weight(reader, name, stored, wanted)
            for name, stored, wanted in _entries(manifest, EXPORT_DTYPES[dtype], exclude_frozen)
        ]
        return write_weights(target, weights, limit)


def get_fp32_state_dict(
    checkpoint: str | os.PathLike[str], tag: str | int | None = None, exclude_frozen: bool = False
) -> dict[str, torch.Tensor]:
    """The model's ``state_dict()`` from ``checkpoint`` (as in `export`), on the CPU: every floating tensor in fp32,
    also frozen parameters that were trained beside in 16 bit; the names of a tied parameter share one tensor."""
    manifest = open_checkpoint(checkpoint, tag)
    verify_files(manifest)
    made: dict[str, torch.Tensor] = {}
    with CheckpointReader(manifest) as reader:
        state = {}
        for name, stored, dtype in _entries(manifest, torch.float32, exclude_frozen):
            if stored not in made:
                made[stored] = reader.read(stored, dtype)
            state[name] = made[stored]
        kept = {name: reader.read(name, None) for name in manifest.tensors if name.startswith(f"{SECTION}.")}
    return state | read_values(kept)


def _weight(reader: CheckpointReader, name: str, stored: str, dtype: torch.dtype) -> Weight:
    shape = reader.manifest.tensors[stored].shape
    return Weight(name, shape, dtype, lambda: reader.read(stored, dtype))


def _entries(
    manifest: Manifest, dtype: torch.dtype | None, exclude_frozen: bool
) -> Iterator[tuple[str, str, torch.dtype]]:
    """Name in the model, name in the checkpoint and dtype to write, in natural order of the names."""
    left_out = frozen_names(manifest) if exclude_frozen else set()
    found: dict[str, tuple[str, torch.dtype]] = {}
    for stored, saved in manifest.tensors.items():
        section, _, name = stored.partition(".")
        if section not in ("parameters", "buffers") or (section == "parameters" and name in left_out):
            continue
        have = DTYPE_OF_CODE[saved.dtype]
        wanted = have
        if dtype is not None and have.is_floating_point:
            is_rounded = conversion(have, dtype) == "rounded"
            wanted = have if section == "buffers" and is_rounded else dtype
        found[name] = stored, wanted
    for alias, name in manifest.aliases.items():
        if name in found:
            found[alias] = found[name]
    if not found:
        raise CheckpointError(f"{manifest.path} holds no parameters.")
    for name in sorted(found, key=natural):
        yield name, *found[name]


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which ``layers.2`` comes before ``layers.10``."""
    return [(int(part) if index % 2 else 0, part) for index, part in enumerate(_DIGITS.split(name))]
