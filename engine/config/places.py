"""JSON paths, and where in a file each of them stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.config.aliases import ALIASES, Path

__all__ = ["Path", "Place", "Places", "join_path", "parse_path", "step"]

Place = tuple[str | None, int | None, int | None]

_STEP = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")


def join_path(path: Path) -> str:
    """``("optimizer", "params", "betas", 0)`` -> ``optimizer.params.betas[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if part.strip() else f'"{part}"')
    return text


def step(tree: Any, part: str | int) -> Any:
    """The value at one step of a path; raises LookupError where there is none."""
    if isinstance(tree, dict):
        return tree[part]
    if isinstance(tree, list) and isinstance(part, int) and part >= 0:
        return tree[part]
    raise LookupError(part)


def parse_path(text: str) -> Path:
    """The inverse of `join_path`."""
    return tuple(int(match[1]) if match[1] else match[2].strip() for match in _STEP.finditer(text))


@dataclass
class Places:
    """Positions by path as the user wrote it, and how written paths relate to canonical ones."""

    file: str | None = None
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)
    values: dict[Path, tuple[int, int]] = field(default_factory=dict)
    moved: dict[Path, Path] = field(default_factory=dict)
    """Canonical path -> the path that was written in the file."""
    overrides: dict[Path, str] = field(default_factory=dict)
    """Canonical path -> the ``--set`` argument that gave it."""

    def written(self, path: Path) -> Path:
        """The path as the user spelled it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.moved:
                return self.moved[path[:end]] + path[end:]
        return path

    def canonical(self, path: Path) -> Path:
        """Today's spelling of a path."""
        for end in range(len(path), 0, -1):
            if path[:end] in ALIASES:
                return self.canonical(ALIASES[path[:end]] + path[end:])
        return path

    def override(self, path: Path) -> str | None:
        """The ``--set`` argument behind a path, if one gave it or something above it."""
        return next((self.overrides[prefix] for prefix in _prefixes(path) if prefix in self.overrides), None)

    def _below(self, path: Path) -> str | None:
        """The ``--set`` argument that gave something below a path, and so made a section that the file lacks."""
        return next((argument for given, argument in self.overrides.items() if given[: len(path)] == path), None)

    def of_key(self, path: Path) -> Place:
        return self._find(path, self.keys)

    def of_value(self, path: Path) -> Place:
        return self._find(path, self.values)

    def _find(self, path: Path, table: dict[Path, tuple[int, int]]) -> Place:
        argument = self.override(path)
        if argument is None and self.file is not None and self.written(path) not in table:
            argument = self._below(path)
        if argument is not None:
            return (f"--set {argument}", None, None)
        for prefix in _prefixes(self.written(path)):
            if prefix in table:
                return (self.file, *table[prefix])
        return (self.file, None, None)


def _prefixes(path: Path) -> Iterator[Path]:
    for end in range(len(path), 0, -1):
        yield path[:end]
