"""A tree that is being brought to today's spelling, and how truth and numbers may be written in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.config.messages import Note, Problem
from engine.config.places import Path, Places, join_path

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})


@dataclass
class Translation:
    """The tree that is being translated, in place, and what there is to say about it."""

    tree: dict[str, Any]
    places: Places
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)
    """Canonical paths that a wrong value would have gone to."""

    def note(self, path: Path, message: str) -> None:
        self.notes.append(Note(join_path(path), message, self.places.of_key(path)[1]))

    def problem(self, path: Path, message: str, code: str, **more: Any) -> None:
        file, line, column = self.places.of_key(path)
        self.problems.append(Problem(join_path(path), message, code, file, line, column, **more))

    def written(self, path: Path) -> str:
        """A canonical path as the user spelled it."""
        return join_path(self.places.written(path))

    def has(self, path: Path) -> bool:
        parent = self.parent(path)
        return parent is not None and path[-1] in parent

    def get(self, path: Path) -> Any:
        parent = self.parent(path)
        return None if parent is None else parent.get(path[-1])

    def pop(self, path: Path) -> Any:
        parent = self.parent(path)
        return None if parent is None else parent.pop(path[-1], None)

    def parent(self, path: Path) -> dict[Any, Any] | None:
        node: Any = self.tree
        for part in path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else None

    def put(self, path: Path, value: Any, written: Path) -> None:
        """Set a value, creating sections, and remember where it really stands in the file."""
        put(self.tree, path, value)
        if path != written:
            self.places.moved[path] = self.places.written(written)


def truth(value: Any) -> bool | None:
    """The truth value that a JSON value spells, or None."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
    return bool(value) if value in (0, 1) else None


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value in ``tree``, creating sections."""
    node: Any = tree
    for part in path[:-1]:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[path[-1]] = value
