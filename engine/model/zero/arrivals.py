"""What is known of a gradient as it arrives, before it is added to others.

By which loss scale the running backward multiplies its loss, so that every gradient can be held to its engine's own.

One backward may bring gradients to several engines (a GAN, a teacher and its student), and a plain ``loss.backward()``
multiplies by nothing at all. And, where a step
has just been skipped, whether it is finite: a sum over ranks no longer tells whose gradient was not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

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


@dataclass
class Inspection:
    """``first``: the lowest registry index whose gradient was not finite. Looking waits for the device, so it is done
    only in the window after a skipped step."""

    is_on: bool = False
    first: int | None = None

    def look(self, index: int, gradient: Tensor) -> None:
        if self.is_on and (self.first is None or index < self.first) and not bool(gradient.isfinite().all()):
            self.first = index
