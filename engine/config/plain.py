"""From what Python code passes as a config to plain JSON values, copied."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any

from engine.config.messages import Problem
from engine.config.places import Path, join_path

MAX_DEPTH = 64


def plain(source: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A deep copy made of dict, list, str, int, float, bool and None, and what could not be made so.

    Tuples become lists, enum members their values, paths text, NumPy scalars numbers.
    """
    problems: list[Problem] = []

    def convert(value: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            problems.append(
                Problem(join_path(path[:3]), f"is nested more than {MAX_DEPTH} deep, or holds itself", "too_deep")
            )
            return None
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, enum.Enum):
            return convert(value.value, path)
        if isinstance(value, int):
            return _integer(int(value), path, problems)
        if isinstance(value, float):
            return _number(float(value), path, problems)
        if isinstance(value, Mapping):
            return mapping(value, path)
        if isinstance(value, list | tuple):
            return [convert(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            return [convert(item, (*path, index)) for index, item in enumerate(sorted(value, key=repr))]
        if isinstance(value, os.PathLike):
            return os.fsdecode(os.fspath(value))
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "shape", None) == ():
            return convert(item(), path)
        name = str(value)
        if name.startswith("torch."):
            return name
        problems.append(
            Problem(
                join_path(path),
                f"a {type(value).__name__} is not a JSON value",
                "type",
                found=repr(value)[:60],
                allowed="text, a number, true, false, null, a list or an object",
            )
        )
        return None

    def mapping(value: Mapping[Any, Any], path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in value.items():
            if isinstance(key, str):
                result[key] = convert(item, (*path, key))
            else:
                problems.append(Problem(join_path(path), f"the key {key!r} is not text", "type", found=repr(key)[:60]))
        return result

    return mapping(source, ()), problems


def _integer(value: int, path: Path, problems: list[Problem]) -> int | None:
    if abs(value) < 10**64:
        return value
    problems.append(
        Problem(join_path(path), "is a number of more than 64 digits", "too_long", allowed="at most 64 digits")
    )
    return None


def _number(value: float, path: Path, problems: list[Problem]) -> float | None:
    if value == value and (abs(value) != float("inf") or path == ("steps_per_print",)):
        return value
    problems.append(Problem(join_path(path), f"{value} is not a finite number", "not_finite", found=repr(value)))
    return None
