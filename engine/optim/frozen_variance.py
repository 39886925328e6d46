"""What 1-bit Adam and 1-bit LAMB share: a variance that learns for `freeze_step` steps and is then frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.optim.compressed import CompressedOptimizer, Flat


class FrozenVariance(CompressedOptimizer):
    """Dense steps up to ``freeze_step``, compressed ones from then on; groups with ``non_freeze`` stay dense."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, freeze_step: int, **compression: Any
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"freeze_step must be at least 1, not {freeze_step}: no variance has been seen before it")
        self.freeze_step = freeze_step
        super().__init__(params, defaults, **compression)

    def stays_local(self, flat: Flat) -> bool:
        return self.num_steps >= self.freeze_step and not flat.options.get("non_freeze")

    def num_variance_updates(self, flat: Flat) -> int:
        step = self.num_steps + 1
        return step if flat.options.get("non_freeze") else min(step, self.freeze_step)

    def scalars(self) -> Mapping[str, float]:
        return {"Train/compression_stage": float(self.num_steps > self.freeze_step)}

    def begins_compression(self, step: int) -> bool:
        """Whether ``step`` is the first compressed one; then it is logged."""
        if step != self.freeze_step + 1:
            return False
        self.announce(f"step {step}: the variance is frozen; from here on momentum travels in 1 bit per element")
        return True
