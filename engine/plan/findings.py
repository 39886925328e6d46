"""What the rules collect while a config is being resolved: problems, notes, missing values and resolved values."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from engine.config.messages import Note, Problem
from engine.plan.plan import Origin, Resolved

if TYPE_CHECKING:
    from engine.config import Config

T = TypeVar("T")


class Findings:
    """Collects what the rules say about one config. Rules add to it and never raise, so that all is told at once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.problems: list[Problem] = []
        self.notes: list[Note] = []
        self.values: list[Resolved] = []
        self.needs_values: list[str] = []
        self.reads: set[str] = set()
        """Paths that were asked about since the last rule began (engine/plan/reads.py)."""

    def problem(
        self,
        path: str,
        message: str,
        *,
        found: Any = None,
        allowed: str = "",
        repair: str = "",
        code: str = "conflict",
        options: tuple[str, ...] = (),
    ) -> None:
        """``code`` is one of `engine.config.messages.CODES`; the rest completes a `Problem`."""
        file, line, column = self._place(path)
        path = self.config.spelled(path)
        self.problems.append(Problem(path, message, code, file, line, column, found, allowed, repair, options))

    def note(self, path: str, message: str) -> None:
        self.notes.append(Note(self.config.spelled(path), message, self._place(path)[1]))

    def resolved(self, path: str, value: T, reason: str = "", origin: Origin | None = None) -> T:
        self.values.append(Resolved(path, value, origin or self.origin(path), reason))
        return value

    def origin(self, path: str) -> Origin:
        self.reads.add(path)
        return self.config.origin(path)

    def is_given(self, path: str) -> bool:
        """Whether the user wrote a value, or somebody supplied one for "auto"."""
        return self.origin(path) != "default" and path not in self.config.autos

    def is_auto(self, path: str) -> bool:
        """Whether the value is "auto" and nobody supplied one."""
        self.reads.add(path)
        return path in self.config.autos

    def source(self, path: str) -> str:
        """Where a value came from, for a sentence: ``config.json:12``, ``--set a=b``, ``given`` or ``default``."""
        if not self.is_given(path):
            return "default"
        file, line, _ = self._place(path)
        if file is None:
            return "given" if line is None else f"line {line}"
        return file if line is None else f"{os.path.basename(file)}:{line}"

    def _place(self, path: str) -> tuple[str | None, int | None, int | None]:
        return self.config.locate(path)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
