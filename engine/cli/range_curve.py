"""The loss of a learning-rate range test: when it diverges, and which learning rates it speaks for.

Smith, arXiv 1506.01186. While it runs, divergence is judged by an exponential mean of the loss over about ten steps.
Afterwards the loss is smoothed over nine steps, the neighbours on both sides alike, so that the curve does not lag
behind the learning rates. The lower end of the range is where it falls fastest per decade of learning rate; the upper
end is a tenth of the learning rate at its minimum, where it is about to rise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

SMOOTHING = 0.9
HALF_WIDTH = 4
WARM_STEPS = 5
"""Steps before anything is called divergence."""
RISE, FACTOR = 1.25, 4.0
"""Divergence: a smoothed loss this much above the first one, or so many times the best."""
MARGIN = 10.0

METHOD = (
    f"the loss is smoothed over {2 * HALF_WIDTH + 1} steps (triangular weights); from the learning rate where it falls "
    f"fastest per decade to 1/{MARGIN:g} of the one at its minimum"
)


class RangeCurve:
    """``lrs`` and ``losses`` of the steps so far; none behind one that is not finite. ``stopped`` says why it ended."""

    def __init__(self) -> None:
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.stopped = ""
        self._mean = 0.0
        self._best = math.inf

    def add(self, lr: float, loss: float | None) -> None:
        if loss is None or not math.isfinite(loss):
            self.stopped = self.stopped or f"the loss is not finite at lr {lr:.3g}"
            return
        self.lrs.append(lr)
        self.losses.append(loss)
        self._mean = SMOOTHING * self._mean + (1.0 - SMOOTHING) * loss
        recent = self._mean / (1.0 - SMOOTHING ** len(self.losses))
        self._best = min(self._best, recent)
        if len(self.losses) <= WARM_STEPS or self._best <= 0:
            return  # where losses are near or below zero, ratios mean nothing
        if recent > RISE * self.losses[0] or recent > FACTOR * self._best:
            self.stopped = (
                f"the loss diverged at lr {lr:.3g}: {recent:.4g} (mean of the last steps) after {self._best:.4g}"
            )

    @property
    def smoothed(self) -> list[float]:
        """What a loss is above divergence counts no more than that: one explosion would blur all before it."""
        if not self.losses:
            return []
        losses = np.array(self.losses)
        if losses[0] > 0:
            losses = np.minimum(losses, RISE * losses[0])
        weights = HALF_WIDTH + 1.0 - np.abs(np.arange(-HALF_WIDTH, HALF_WIDTH + 1))
        total = np.convolve(losses, weights)[HALF_WIDTH:-HALF_WIDTH]
        share = np.convolve(np.ones(len(losses)), weights)[HALF_WIDTH:-HALF_WIDTH]
        return [float(value) for value in total / share]

    def steepest(self) -> int | None:
        """The step at which the smoothed loss falls fastest per decade, before its minimum; None if it never falls."""
        smoothed, lowest = self.smoothed, self.lowest()
        if lowest is None or lowest < 2:
            return None
        decades = np.log10(np.maximum(self.lrs[: lowest + 1], 1e-300))
        if len(np.unique(decades)) < len(decades):
            return None  # a staircase, or a rate of 0: the learning rate stood still
        slopes = np.gradient(np.array(smoothed[: lowest + 1]), decades)
        step = int(np.argmin(slopes))
        return step if slopes[step] < 0 else None

    def lowest(self) -> int | None:
        smoothed = self.smoothed
        return int(np.argmin(smoothed)) if smoothed else None

    def suggested(self) -> tuple[float, float] | None:
        """(lower, upper) learning rate; None where the loss never fell."""
        steepest, lowest = self.steepest(), self.lowest()
        if steepest is None or lowest is None:
            return None
        low, high = self.lrs[steepest], self.lrs[lowest] / MARGIN
        return min(low, high), max(low, high)

    def result(self, num_steps: int) -> dict[str, Any]:
        """As JSON values."""
        steepest, lowest, suggested = self.steepest(), self.lowest(), self.suggested()
        return {
            "lr": self.lrs,
            "loss": self.losses,
            "smoothed_loss": self.smoothed,
            "steps": len(self.lrs),
            "steps_planned": num_steps,
            "stopped": self.stopped or None,
            "lr_of_steepest_descent": None if steepest is None else self.lrs[steepest],
            "lr_of_minimum": None if lowest is None else self.lrs[lowest],
            "suggested_min_lr": None if suggested is None else suggested[0],
            "suggested_max_lr": None if suggested is None else suggested[1],
            "method": METHOD,
        }

    def told(self) -> str:
        """For people, in a few lines."""
        lines = [self.stopped or "the loss did not diverge: a higher last learning rate would say more"]
        suggested = self.suggested()
        if suggested is None:
            lines.append("no suggestion: the loss never fell; begin lower, or take more steps")
        else:
            steepest, lowest = self.steepest(), self.lowest()
            assert steepest is not None
            assert lowest is not None
            lines.append(
                f"the loss falls fastest at lr {self.lrs[steepest]:.3g} and is lowest at {self.lrs[lowest]:.3g}"
            )
            lines.append(
                f"suggested: lr from {suggested[0]:.2g} (steepest descent or, if that is lower, one order below the "
                f"minimum) to {suggested[1]:.2g}"
                if suggested[0] != self.lrs[steepest]
                else f"suggested: lr from {suggested[0]:.2g} (steepest descent) to {suggested[1]:.2g} (one order below "
                "the minimum)"
            )
        return "\n".join(lines)
