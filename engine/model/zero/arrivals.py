"""By which loss scale the running backward multiplies its loss, so that every gradient can be held to its engine's own.

One backward may bring gradients to several engines (a GAN, a teacher and its student), and a plain ``loss.backward()``
multiplies by nothing at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_running: list[float] = []


@contextlib.contextmanager
def scaled_by(scale: float) -> Iterator[None]:
    """A backward of an engine, whose loss is multiplied by ``scale``."""
    _running.append(scale)
    try:
        yield
    finally:
        _running.pop()


def running_scale() -> float | None:
    """The innermost engine backward's scale; None in a plain backward."""
    return _running[-1] if _running else None
