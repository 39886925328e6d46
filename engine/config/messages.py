"""What the config layer tells people: problems, notes, and the error that carries them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class EngineError(Exception):
    """The user's mistake or an impossible request, told in one clear message. The command line exits with 2."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config.

    ``path`` is the JSON path as the user spelled it, '' for the whole file. ``code`` is a stable word for programs.
    ``file``, ``line`` and ``column`` (both from 1) are None where there is no such place. ``allowed`` completes
    "allowed: ..."; ``repair`` is what to do, as a clause or a question.
    """

    path: str
    message: str
    code: str = ""
    file: str | None = None
    line: int | None = None
    column: int | None = None
    found: Any = None
    allowed: str = ""
    repair: str = ""

    def render(self) -> str:
        """``file:line:column: path: message (allowed: ...); repair``, as far as each part is known."""
        place = self.file or ""
        if self.line is not None:
            place = ":".join([place or "line", str(self.line), *([] if self.column is None else [str(self.column)])])
        text = ": ".join(part for part in (place, self.path, self.message) if part)
        if self.allowed:
            text += f" (allowed: {self.allowed})"
        if self.repair:
            text += f"; {self.repair}"
        return text

    def to_json(self) -> dict[str, Any]:
        """The record that ``validate --json`` prints."""
        keys = ("path", "file", "line", "column", "code", "message", "found", "allowed", "repair")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Note:
    """Something the user should know about a config that is nevertheless right."""

    path: str
    message: str
    line: int | None = None

    def render(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(EngineError):
    """A config that cannot be used. Carries every problem that was found, sorted by place."""

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_place))
        super().__init__(self.problems)

    def __str__(self) -> str:
        files = {problem.file for problem in self.problems if problem.file}
        where = f" in {files.pop()}" if len(files) == 1 else " in the config"
        count = f"{len(self.problems)} problem{'' if len(self.problems) == 1 else 's'}{where}:"
        return "\n".join([count, *("  " + problem.render() for problem in self.problems)])


def _place(problem: Problem) -> tuple[str, float, float, str]:
    line = float("inf") if problem.line is None else problem.line
    column = float("inf") if problem.column is None else problem.column
    return (problem.file or "", line, column, problem.path)


def show(value: Any, limit: int = 60) -> str:
    """A value as JSON text for a message, shortened in the middle of nothing longer than ``limit`` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
