"""Numbers as people write them: 1.3b parameters, 80GB."""

from __future__ import annotations

import re

from engine.config.messages import EngineError

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 10**3, "m": 10**6, "g": 10**9,
    "t": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_count(text: str) -> int:
    """``"1.3b"`` -> 1,300,000,000 parameters. Raises EngineError for what is no number >= 1."""
    return _parse(text, _COUNTS, "a number of parameters, such as 125m or 1.3b")


def parse_bytes(text: str) -> int:
    """``"80GB"`` -> 80,000,000,000 bytes, ``"80GiB"`` -> 80 x 2^30. Raises EngineError for what is no size."""
    return _parse(text, _BYTES, "a size of memory, such as 24GB or 80GiB")


def _parse(text: str, units: dict[str, int], what: str) -> int:
    match = _NUMBER.fullmatch(text)
    unit = units.get(match[2].lower()) if match is not None else None
    if match is None or unit is None:
        raise EngineError(f"{text!r} is not {what}")
    value = round(float(match[1].replace(",", "").replace("_", "")) * unit)
    if value < 1:
        raise EngineError(f"{text!r} is not {what}")
    return value


def format_count(count: int) -> str:
    """``1.3 billion``, ``125 million``, ``9,500``."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.4g} {word}"
    return f"{count:,}"
