"""The manifest: what a checkpoint holds, where, and under which layout it was written. JSON, never pickle.

Written by `encode_manifest`; read, with every claim checked, by engine/checkpoint/manifest_reader.py.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine.checkpoint.boxes import Box
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.json_values import decode
from engine.checkpoint.tensor_file import FileRecord
from engine.contracts import OnLayoutChange, SavedLayout
from engine.plan.placement import axes_in_order

FORMAT = "ptrain-checkpoint"
FORMAT_VERSION = 1
CLIENT_STATE = "client_state"


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and where it lies: ``key`` of ``file``."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class SavedTensor:
    """``shape`` (global), ``dtype`` as safetensors names it, and the pieces that cover it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SavedState:
    """A `Stateful`'s state, encoded: one value where all ranks agreed, else one a rank."""

    on_layout_change: OnLayoutChange
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents. ``path`` is the folder that it was read from (empty while it is being written).

    ``aliases`` maps a tied parameter's other names to the name it is stored under. ``config`` and ``counters`` are
    rank 0's, decoded when read. ``metric``: the validation loss at the save, where there was one. ``versions``: of the
    engine, torch and Python that wrote it.
    """

    tag: str
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, FileRecord]
    aliases: Mapping[str, str]
    states: Mapping[str, SavedState]
    encoded_client_state: Any
    config: dict[str, Any]
    counters: dict[str, Any]
    layout: SavedLayout
    metric: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    path: Path = Path()

    def resolve(self, name: str) -> str | None:
        """The name under which tensor ``name`` is stored, through the aliases of tied parameters; None if it is not."""
        if name in self.tensors:
            return name
        section, _, rest = name.partition(".")
        parameter, _, key = rest.rpartition(".")  # optimizer.NAME.exp_avg
        for stored in (
            f"{section}.{self.aliases[rest]}" if rest in self.aliases else None,
            f"{section}.{self.aliases[parameter]}.{key}" if parameter in self.aliases else None,
        ):
            if stored in self.tensors:
                return stored
        return None

    def same_ranks(self, layout: SavedLayout) -> bool:
        """Whether what belonged to a rank then belongs to the same rank under ``layout``: an equal world, and equal
        mesh axes in the same order."""
        return self.layout.world_size == layout.world_size and _axes(self.layout) == _axes(layout)

    def state(self, name: str, layout: SavedLayout, rank: int) -> Any | None:
        """The state of the `Stateful` ``name`` for ``rank`` under the present ``layout``.

        None where it was not saved, or belonged to the ranks of another layout and may be dropped. Raises
        `CheckpointError` where it cannot be had under this layout and must not be dropped.
        """
        saved = self.states.get(name)
        if saved is None:
            return None
        if not self.same_ranks(layout) and saved.on_layout_change != "reshard":
            if saved.on_layout_change == "drop":
                return None
            raise CheckpointError(
                f"{self.path}: the state of {name!r} belongs to the layout it was saved under ({_words(self.layout)}) "
                f"and cannot be loaded under {_words(layout)}. Resume under the saved layout, or load weights only."
            )
        return decode(saved.values[rank if len(saved.values) > 1 else 0], f"states.{name}")


def _axes(layout: SavedLayout) -> list[tuple[str, int]]:
    """The axes above 1 with their degrees, outermost first."""
    split = {axis: size for axis, size in layout.mesh.items() if size != 1}
    order = [axis for axis in axes_in_order(layout.placement) if axis in split]
    return [(axis, split[axis]) for axis in (*order, *sorted(split.keys() - set(order)))]


def _words(layout: SavedLayout) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in _axes(layout))
    return f"world size {layout.world_size}" + (f" with {axes}" if axes else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for key, distribution in (("engine", "ptrain-engine"), ("torch", "torch")):
        try:
            found[key] = version(distribution)
        except PackageNotFoundError:  # run from a checkout
            found[key] = "unknown"
    return found


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON that carries its own hash. Numbers are exact; keys keep their order."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tag": manifest.tag,
        "versions": dict(manifest.versions),
        "layout": {**asdict(manifest.layout), "mesh": dict(manifest.layout.mesh)},
        "counters": manifest.counters,
        "metric": manifest.metric,
        "config": manifest.config,
        CLIENT_STATE: manifest.encoded_client_state,
        "states": {
            name: {"on_layout_change": state.on_layout_change, "values": list(state.values)}
            for name, state in manifest.states.items()
        },
        "aliases": dict(manifest.aliases),
        "files": {
            record.name: {"size_bytes": record.size_bytes, "xxh3_128": record.xxh3_128}
            for record in manifest.files.values()
        },
        "tensors": {
            name: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "pieces": [[piece.file, piece.key, *piece.box] for piece in tensor.pieces],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    content["sha256"] = content_hash(content)
    return _lines(content, num_levels=2).encode()


def _lines(content: Mapping[str, Any], num_levels: int) -> str:
    """JSON with one entry a line on the outer levels, so that people can read and compare it."""
    entries = [
        f"{json.dumps(key)}: "
        + (_lines(value, num_levels - 1) if num_levels > 1 and isinstance(value, dict) and value else json.dumps(value))
        for key, value in content.items()
    ]
    return "{\n" + ",\n".join(entries) + "\n}"


def content_hash(content: Mapping[str, Any]) -> str:
    """The hash of a manifest's content, its own "sha256" left out, whatever the white space."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()
