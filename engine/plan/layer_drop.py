"""The keep probability of progressive layer dropping (Zhang & He, arXiv 2010.13369)."""

from __future__ import annotations

import math


def theta_at(step: int, theta: float, gamma: float) -> float:
    """``(1 - theta) * exp(-gamma * step) + theta`` after ``step`` steps: 1 at the start, ``theta`` in the end."""
    return (1.0 - theta) * math.exp(-gamma * step) + theta
