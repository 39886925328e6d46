"""Clipping by the global L2 norm (JSON key ``gradient_clipping``; Pascanu et al., arXiv 1211.5063)."""

from __future__ import annotations

from engine.contracts import Clipping, EngineError

EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ and DeepSpeed add to the norm, so that a zero norm divides."""


class GlobalNormClipping:
    """The Clipping role: gradients longer than ``maximum`` are scaled down to it."""

    def __init__(self, maximum: float) -> None:
        if not 0.0 < maximum < float("inf"):
            raise EngineError(f"gradient_clipping must be a positive finite number, or 0 for none; it is {maximum}.")
        self.maximum = float(maximum)

    def coefficient(self, norm: float) -> float:
        """What the gradients are multiplied by; ``norm`` is the global, unscaled L2 norm."""
        return min(1.0, self.maximum / (norm + EPSILON))


class NoClipping:
    """The neutral element."""

    def coefficient(self, norm: float) -> float:
        return 1.0


def build_clipping(maximum: float) -> Clipping:
    """The clipping that ``gradient_clipping: maximum`` asks for; 0 is none."""
    return NoClipping() if maximum == 0.0 else GlobalNormClipping(maximum)
