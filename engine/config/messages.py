"""What the config layer tells people: problems, notes, and the error that carries them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class EngineError(Exception):
    """The user's mistake or an impossible request, told in one clear message. The command line exits with 2."""


CODES: dict[str, str] = {
    "source": "what was given is no config",
    "file": "the file is not there, or cannot be read",
    "encoding": "the file is not UTF-8 text",
    "syntax": "the text is not JSON",
    "python": "a word of Python's stands for JSON's",
    "placeholder": "a template's placeholder was not filled in",
    "duplicate-key": "a key is written twice in one object",
    "not-finite": "NaN, an infinity, or a number too large for one",
    "too-deep": "objects are nested too deep",
    "too-long": "a number has too many digits",
    "override": "an argument of --set, or an override, names no key",
    "unknown-key": "there is no such key here",
    "unknown-type": "there is no optimizer or schedule of that name",
    "unusable-type": "an optimizer or schedule that cannot be used from a config",
    "missing-key": "a key that is needed here has no value",
    "type": "a value of another type than the key takes",
    "value": "a value that the key does not take",
    "conflict": "two keys contradict each other",
    "batch-arithmetic": "the three batch sizes do not multiply out for this number of ranks",
    "ranks": "a group of ranks does not divide the ranks there are, or there are too many for the devices",
    "device": "the device that was asked for is not there",
    "needs-values": '"auto" stands where only the caller knows the value',
    "not-built": "a known feature that this engine does not have is switched on",
}
"""Every ``Problem.code``, with what it means. Codes are stable: programs may compare them."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config.

    ``path`` is the JSON path as the user spelled it, '' for the whole file. ``code`` is one of `CODES`.
    ``file``, ``line`` and ``column`` (both from 1) are None where there is no such place. ``found`` is the value that
    is wrong, None where there is none. ``allowed`` completes "allowed: ..."; ``repair`` is what to do, as a clause or a
    question. ``options`` is what would be right where a sentence need not repeat it: programs get it as ``allowed``.
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
    options: tuple[str, ...] = ()

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
        keys = ("path", "line", "column", "code", "message", "found", "allowed", "repair")
        record = {key: getattr(self, key) for key in keys}
        record["allowed"] = self.allowed or ", ".join(self.options)
        if self.line is None and self.file and self.file.startswith("--set "):
            record["message"] = f"{self.file}: {self.message}"
        return record


@dataclass(frozen=True)
class Note:
    """Something the user should know about a config that is nevertheless right."""

    path: str
    message: str
    line: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The record that ``validate --json`` prints."""
        return {"path": self.path, "line": self.line, "message": self.message}

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


def in_one_line(error: Exception) -> str:
    """Its type and the first line of what it says."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
