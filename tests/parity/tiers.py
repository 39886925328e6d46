"""Which tier a cell of a large table belongs to: `make test`, `make test-slow`, or `make matrix` alone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One set of a test's parameters, for `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def tiers(
    cells: Sequence[Hashable], quick: Collection[Hashable], slow_of: int = 4, first_slow: Collection[Hashable] = ()
) -> list[tuple[Hashable, list[pytest.MarkDecorator]]]:
    """Every cell with its marks: none for the ``quick`` ones. Of the others the ``first_slow`` ones and every
    ``slow_of``-th are slow, and the rest run by `make matrix`. A table of a product in order is sampled along all of
    its axes where ``slow_of`` shares no divisor with their lengths."""
    others = [cell for cell in cells if cell not in quick]
    slow = {*first_slow, *others[::slow_of]}
    return [
        (cell, [] if cell in quick else [pytest.mark.slow if cell in slow else pytest.mark.matrix]) for cell in cells
    ]
