"""Python values as JSON and back, unchanged: tuples, keys that are not strings, nan and infinities, tensors.

JSON would turn ``{1: (2, 3)}`` into ``{"1": [2, 3]}`` without a word. Here a value comes back as it went in or is
refused by its path. Four one-key objects carry what JSON lacks; a user's dict that looks like one is written as items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from engine.checkpoint.errors import CheckpointError

TUPLE, ITEMS, FLOAT, TENSOR = "__tuple__", "__items__", "__float__", "__tensor__"
_MARKERS = {TUPLE, ITEMS, FLOAT, TENSOR}
_MAX_DEPTH = 100


def encode(value: Any, path: str, keep_tensor: Callable[[torch.Tensor], str] | None = None) -> Any:
    """``value`` as plain JSON types. ``keep_tensor`` stores a tensor and returns its name; None refuses tensors.

    Raises `CheckpointError` that names the path of what cannot be kept.
    """
    return _encode(value, path, keep_tensor, 0)


def _encode(value: Any, path: str, keep_tensor: Callable[[torch.Tensor], str] | None, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{path[:80]}...: nested deeper than {_MAX_DEPTH} levels, or contains itself.")
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    # int(), str() and float() make plain values of subclasses such as IntEnum.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: str(float(value))}
    if isinstance(value, torch.Tensor) and keep_tensor is not None:
        return {TENSOR: keep_tensor(value)}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}[{i}]", keep_tensor, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    if isinstance(value, Mapping):
        pairs = [
            (_encode(key, f"{path} (a key)", None, depth + 1), _encode(item, f"{path}.{key}", keep_tensor, depth + 1))
            for key, item in value.items()
        ]
        if all(isinstance(key, str) for key, _ in pairs) and not (len(pairs) == 1 and pairs[0][0] in _MARKERS):
            return dict(pairs)
        return {ITEMS: [list(pair) for pair in pairs]}
    kept = "None, bool, int, float, str, list, tuple, dict" + (" and torch tensors" if keep_tensor else "")
    raise CheckpointError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be kept in a checkpoint; {kept} can. "
        "Convert it, for example with its own state_dict() or torch.from_numpy()."
    )


def decode(value: Any, path: str, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """The inverse of `encode`. ``tensor`` gives the tensor of a name. Raises `CheckpointError` on a malformed value."""
    return _decode(value, path, tensor, 0)


def _decode(value: Any, path: str, tensor: Callable[[str], torch.Tensor] | None, depth: int) -> Any:
    if depth > 3 * _MAX_DEPTH:  # a level of Python is up to three of JSON
        raise CheckpointError(f"{path[:80]}...: nested deeper than {3 * _MAX_DEPTH} levels.")
    if isinstance(value, list):
        return [_decode(item, f"{path}[{i}]", tensor, depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    marker = next(iter(value)) if len(value) == 1 else None
    if marker not in _MARKERS:
        return {key: _decode(item, f"{path}.{key}", tensor, depth + 1) for key, item in value.items()}
    content = value[marker]
    if marker == TENSOR and isinstance(content, str) and tensor is not None:
        return tensor(content)
    if marker == FLOAT and content in ("nan", "inf", "-inf"):
        return float(content)
    if marker == TUPLE and isinstance(content, list):
        return tuple(_decode(item, f"{path}[{i}]", tensor, depth + 1) for i, item in enumerate(content))
    if marker == ITEMS and isinstance(content, list):
        return {
            _hashable(_decode(pair[0], path, None, depth + 1), path): _decode(pair[1], path, tensor, depth + 1)
            for pair in content
            if _is_pair(pair, path)
        }
    raise CheckpointError(f"{path}: malformed {marker} in the manifest.")


def _is_pair(pair: Any, path: str) -> bool:
    if isinstance(pair, list) and len(pair) == 2:
        return True
    raise CheckpointError(f"{path}: malformed {ITEMS} in the manifest.")


def _hashable(key: Any, path: str) -> Any:
    try:
        hash(key)
    except TypeError:
        raise CheckpointError(f"{path}: malformed {ITEMS} in the manifest: {key!r} as a key.") from None
    return key
