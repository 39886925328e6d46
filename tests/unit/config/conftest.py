"""Shorthand for config tests: write a file, look at it, compare what is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import ConfigError, Examination, Problem, examine, load_config

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a config file as given (no newline translation); returns its path."""

    def write_file(text: str) -> str:
        path = tmp_path / "run.json"
        path.write_bytes(text.encode())
        return str(path)

    return write_file


def problems_of(source: object, **options: object) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, **options)  # type: ignore[arg-type]
    return caught.value.problems


def paths_of(source: object, **options: object) -> list[str]:
    return [problem.path for problem in problems_of(source, **options)]


def notes_of(source: object, **options: object) -> dict[str, str]:
    found: Examination = examine(source, **options)  # type: ignore[arg-type]
    assert found.problems == ()
    return {note.path: note.message for note in found.notes}
