"""Python state as JSON and back, exactly: what JSON cannot say is written as ``{"$kind": value}``.

For the small states of schedulers and parameter groups. Tensors become ``{"$tensor": [dtype, nested list]}``. Functions
are left out, as torch leaves them out of a scheduler's state.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import torch

from engine.contracts import EngineError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}
_OMITTED = object()


def encode(value: Any, where: str = "state") -> Any:
    """``value`` as JSON types. Raises EngineError naming the place of a value that has no exact form."""
    encoded = _encode(value, where)
    return None if encoded is _OMITTED else encoded


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": [str(value.dtype).removeprefix("torch."), _encode(value.tolist(), where)]}
    if isinstance(value, list):
        # A function in a list keeps its place: the positions of its neighbours mean something.
        return [encode(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(entry, f"{where}[{i}]") for i, entry in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if callable(value):
        return _OMITTED
    raise EngineError(
        f"{where} holds a {type(value).__name__}, which has no exact JSON form; leave it out of the state."
    )


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    pairs = [(key, _encode(entry, f"{where}.{key}")) for key, entry in value.items()]
    pairs = [(key, entry) for key, entry in pairs if entry is not _OMITTED]
    plain = type(value) in (dict, OrderedDict) and all(isinstance(key, str) and key[:1] != "$" for key, _ in pairs)
    if plain:
        return dict(pairs)
    kind = "$counter" if isinstance(value, Counter) else "$dict"
    return {kind: [[_encode(key, where), entry] for key, entry in pairs]}


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "$float":
            return float(content)
        if kind == "$tensor":
            return torch.tensor(decode(content[1]), dtype=_DTYPES[content[0]])
        if kind == "$tuple":
            return tuple(decode(content))
        if kind in ("$counter", "$dict"):
            pairs = {decode(key): decode(entry) for key, entry in content}
            return Counter(pairs) if kind == "$counter" else pairs
    return {key: decode(entry) for key, entry in value.items()}
