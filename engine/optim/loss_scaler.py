"""The loss scale of fp16 training (JSON section ``fp16``), one rule for every ZeRO stage.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before backward and the gradients are divided by
it afterwards (Micikevicius et al., arXiv 1710.03740). The dynamic rule is DeepSpeed's, value by value:

* an overflow first uses up the hysteresis (``hysteresis`` - 1 overflows leave the scale as it is), then halves the
  scale at every further one; a rise refills the hysteresis, with ``consecutive_hysteresis`` every clean step does;
* the scale doubles after ``window_steps + 1`` clean steps since the start or the last overflow, and every
  ``window_steps`` after that.

Two additions: the scale never exceeds 2**32 (DeepSpeed has no cap; fp32 losses overflow long before 2**128), and the
hysteresis counts at stage 0 as well, where DeepSpeed ignores it.
"""

from __future__ import annotations

from typing import Any

from engine.contracts import EngineError, OnLayoutChange, SavedLayout
from engine.plan.plan import LossScalePlan

MAXIMUM_SCALE = 2.0**32
GROWTH_FACTOR = 2.0


class LossScaler:
    """The Precision role. ``scale`` multiplies the loss of the next window; `update` is told once per boundary."""

    name = "loss_scaler"
    on_layout_change: OnLayoutChange = "reshard"

    def __init__(self, plan: LossScalePlan) -> None:
        self._plan = plan
        self.scale = float(plan.initial if plan.dynamic else plan.static)
        if not 0.0 < self.scale < float("inf"):
            raise EngineError(f"The loss scale must be a positive finite number, not {self.scale}.")
        if plan.dynamic and (plan.window_steps < 1 or plan.hysteresis < 1):
            raise EngineError(
                f"fp16.loss_scale_window ({plan.window_steps}) and fp16.hysteresis ({plan.hysteresis}) must be at "
                "least 1: with less, the scale never grows or never shrinks."
            )
        self._iteration = 0
        self._last_overflow = -1
        self._hysteresis = plan.hysteresis
        self.exhausted = False
        """True once an overflow asked for a scale below the minimum: no smaller scale can help, the run must end."""

    @property
    def dynamic(self) -> bool:
        return self._plan.dynamic

    def update(self, overflow: bool) -> None:
        """Take note of one boundary; ``overflow``: some rank held a gradient that was not finite."""
        if not self._plan.dynamic:
            return
        if overflow:
            self._shrink()
            self._last_overflow = self._iteration
        else:
            self._grow()
        self._iteration += 1

    def _shrink(self) -> None:
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        minimum = float(self._plan.minimum)
        self.exhausted = self.scale <= minimum
        if not self.exhausted:
            self.scale = max(self.scale / GROWTH_FACTOR, minimum)

    def _grow(self) -> None:
        if self._plan.consecutive_hysteresis:
            self._hysteresis = self._plan.hysteresis
        num_clean = self._iteration - self._last_overflow - 1
        if num_clean > 0 and num_clean % self._plan.window_steps == 0:
            self._hysteresis = self._plan.hysteresis
            self.scale = max(self.scale, min(self.scale * GROWTH_FACTOR, MAXIMUM_SCALE))

    def state(self) -> dict[str, Any]:
        return {
            "dynamic": self._plan.dynamic,
            "scale": self.scale,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None:
        """Continue a saved sequence. Only a dynamic scale continues a dynamic one; a static scale is the config's."""
        if not (self._plan.dynamic and state["dynamic"]):
            return
        self.scale = max(float(state["scale"]), float(self._plan.minimum))
        self._iteration = int(state["iteration"])
        self._last_overflow = int(state["last_overflow"])
        self._hysteresis = min(int(state["hysteresis"]), self._plan.hysteresis)
        self.exhausted = False
