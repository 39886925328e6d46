"""What is known of a gradient as it arrives, before it is added to others.

By which loss scale the running backward multiplies its loss, so that every gradient can be held to its engine's own.

One backward may bring gradients to several engines (a GAN, a teacher and its student), and a plain ``loss.backward()``
multiplies by nothing at all. And, where a step
has just been skipped, whether it is finite: a sum over ranks no longer tells whose gradient was not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

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


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """``method`` as a hook that keeps its object not alive. What hooks hang on lies where the garbage collector cannot
    follow: through a bound method they would hold the role for good, and with it the model and its gradients."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := weak()) is not None:
            alive(*args)

    return call


class Arrivals:
    """The part of a `Reduction` that knows of gradients as they come; its hooks call `_note_arrival`."""

    def __init__(self) -> None:
        self._scales: set[float | None] = set()
        self._inspects = False
        self._first: int | None = None

    def _note_arrival(self, index: int, gradient: Tensor) -> None:
        self._scales.add(running_scale())
        if self._inspects and (self._first is None or index < self._first) and not bool(gradient.isfinite().all()):
            self._first = index

    def scales(self) -> set[float | None]:
        return self._scales

    def inspect(self, next_window: bool) -> None:
        """Looking at a gradient waits for the device, so it is done only in the window after a skipped step."""
        self._inspects, self._first = next_window, None

    def first_nonfinite_arrival(self) -> int | None:
        return self._first
