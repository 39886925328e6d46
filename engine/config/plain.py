"""From what Python code passes as a config to plain JSON values, copied."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any

from engine.config.messages import Problem
from engine.config.places import Path, Places, join_path
from engine.config.reader import MAX_DEPTH, MAX_DIGITS, Document

_REFUSED: Any = object()
_PLAIN = "text, a number, true, false, null, a list or an object"


def plain(source: Mapping[Any, Any]) -> Document:
    """A deep copy made of dict, list, str, int, float, bool and None; what cannot be made so is a problem.

    Tuples and sets become lists, enum members their values, paths text,
    NumPy scalars numbers, dtypes of torch their names.
    """
    converter = _Converter()
    document = converter.document
    document.value = converter.mapping(source, ())
    return document


class _Converter:
    def __init__(self) -> None:
        self.document = Document(places=Places())

    def refuse(self, path: Path, message: str, code: str, value: Any = None, allowed: str = "") -> Any:
        found = None if value is None else repr(value)[:60]
        repair = "pass a plain value" if path else "pass a dict of plain values"
        options = (_PLAIN,)
        self.document.problems.append(
            Problem(join_path(path), message, code, found=found, allowed=allowed, repair=repair, options=options)
        )
        self.document.broken.add(path)
        return _REFUSED

    def mapping(self, value: Mapping[Any, Any], path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                self.refuse(path, f"the key {key!r} is not text", "type", key)
                continue
            converted = self.convert(item, (*path, key))
            if converted is not _REFUSED:
                result[key] = converted
        return result

    def sequence(self, value: Any, path: Path) -> Any:
        result = [self.convert(item, (*path, index)) for index, item in enumerate(value)]
        return _REFUSED if any(item is _REFUSED for item in result) else result

    def convert(self, value: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            return self.refuse(path[:3], f"is nested more than {MAX_DEPTH} deep, or holds itself", "too-deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self.convert(value.value, path)
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            if abs(value) < 10**MAX_DIGITS:
                return int(value)
            return self.refuse(path, f"is a number of more than {MAX_DIGITS} digits", "too-long")
        if isinstance(value, float):
            if value == value and (abs(value) != float("inf") or path == ("steps_per_print",)):
                return float(value)
            return self.refuse(path, f"{value} is not a finite number", "not-finite", value)
        return self.container(value, path)

    def container(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return self.mapping(value, path)
        if isinstance(value, list | tuple):
            return self.sequence(value, path)
        if isinstance(value, set | frozenset):
            return self.sequence(sorted(value, key=repr), path)
        if isinstance(value, os.PathLike):
            return os.fsdecode(os.fspath(value))
        if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
            return self.convert(value.item(), path)
        if type(value).__module__ == "torch" and str(value).startswith("torch."):
            return str(value)
        kind = type(value).__name__
        return self.refuse(path, f"a {kind} is not a JSON value", "type", value, _PLAIN)
