"""The one error of this room, and how a failure on one rank is put into words for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.contracts import EngineError

T = TypeVar("T")


class CheckpointError(EngineError):
    """A checkpoint that cannot be written or read. Collective calls raise it alike on every rank."""


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Run ``action`` and return ``(its value, None)``, or ``(None, what went wrong)``."""
    try:
        return action(), None
    except EngineError as error:
        return None, str(error)
    except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
        return None, f"{type(error).__name__}: {error}"


def summarise(failures: Sequence[str | None]) -> str | None:
    """One sentence about what failed where, from one entry a rank; None when nothing did."""
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if not failed:
        return None
    if len(failures) == 1:
        return failed[0]
    by_text: dict[str, list[int]] = {}
    for rank, failure in failed.items():
        by_text.setdefault(failure, []).append(rank)
    if len(by_text) == 1 and len(failed) == len(failures):
        return f"on every rank: {failures[0]}"
    parts = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    shown = "; ".join(parts[:4])
    return shown if len(parts) <= 4 else f"{shown}; and {len(parts) - 4} more"


def listing(names: Sequence[str], limit: int = 10) -> str:
    """``names`` joined for a message, cut after ``limit``."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, and {len(names) - limit} more"
