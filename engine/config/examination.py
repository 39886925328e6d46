"""What became of a source that was read, right or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.config import Config
    from engine.config.messages import Note, Problem


@dataclass(frozen=True)
class Examination:
    """``config`` is there whenever the source could be typed at all, with wrong values at their defaults; use it only
    to look for further problems when ``problems`` is not empty. ``unclear``: the canonical paths of those values, and
    of the keys that a misspelled one may have meant."""

    config: Config | None
    problems: tuple[Problem, ...]
    notes: tuple[Note, ...]
    unclear: frozenset[str] = frozenset()
