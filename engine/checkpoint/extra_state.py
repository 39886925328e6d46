"""What modules keep beside parameters and buffers (`torch.nn.Module.get_extra_state`), as tensors of a checkpoint.

The value of state-dict key KEY is JSON in the bytes of ``extra_state.KEY``; tensors in it are ``extra_state.KEY.0`` and
so on. Never pickle: whatever else such a value holds is refused by its path when the engine is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.json_values import decode, encode
from engine.checkpoint.loading import tensor_like_saved
from engine.checkpoint.manifest import Manifest
from engine.contracts import Chunk
from engine.parameters import EXTRA_STATE, extra_state_keys

SECTION = "extra_state"
_TENSOR = re.compile(rf"{SECTION}\.(?P<key>(?:.*\.)?{EXTRA_STATE})(?:\.\d+)?")


class ExtraState:
    """The modules of ``model`` that have such a state. Raises `CheckpointError` for one that cannot be saved."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = extra_state_keys(model)
        self.chunks(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def chunks(self, keys: Iterable[str]) -> list[Chunk]:
        """The states of ``keys`` as they are now."""
        return [chunk for key in keys for chunk in chunks_of_value(key, self._modules[key].get_extra_state())]

    def wanted(self, manifest: Manifest) -> list[Chunk]:
        """Targets for what the checkpoint has of these modules, to be handed to `load` when they are filled."""
        saved = [name for name in manifest.tensors if _key_of(name) in self._modules]
        absent = [f"{SECTION}.{key}" for key in self._modules if f"{SECTION}.{key}" not in saved]
        return [
            *(Chunk.whole(name, tensor_like_saved(manifest, name)) for name in saved),
            *(Chunk.whole(name, torch.empty(0, dtype=torch.uint8)) for name in absent),  # told as missing
        ]

    def load(self, manifest: Manifest, filled: Iterable[Chunk]) -> None:
        """Give every module its state; those of which the checkpoint has none keep what they have."""
        values = read_values({chunk.name: chunk.tensor for chunk in filled if chunk.name in manifest.tensors})
        for key, value in values.items():
            self._modules[key].set_extra_state(value)


def is_extra_state(key: str) -> bool:
    """Whether a key of a state dict is one of an extra state."""
    return key.rpartition(".")[2] == EXTRA_STATE


def read_values(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values by their state-dict keys. Raises `CheckpointError` where they are not as `ExtraState` writes them."""
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        key = _key_of(name)
        if key is None or name != f"{SECTION}.{key}":
            continue
        try:
            encoded = json.loads(bytes(tensor.tolist()))
            values[key] = decode(encoded, name, tensors.__getitem__)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"{name} is not what a checkpoint keeps of a module ({type(error).__name__}: {error})"
            ) from None
    return values


def _key_of(name: str) -> str | None:
    match = _TENSOR.fullmatch(name)
    return None if match is None else match["key"]


def chunks_of_value(key: str, value: Any) -> list[Chunk]:
    """The extra state ``value`` of state-dict key ``key``. Raises `CheckpointError` for what cannot be kept."""
    name = f"{SECTION}.{key}"
    tensors: list[Chunk] = []

    def keep(tensor: Tensor) -> str:
        tensors.append(Chunk.whole(f"{name}.{len(tensors)}", tensor))
        return tensors[-1].name

    text = json.dumps(encode(value, name, keep)).encode()
    return [Chunk.whole(name, torch.frombuffer(bytearray(text), dtype=torch.uint8)), *tensors]
