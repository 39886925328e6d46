"""What scripts import from ``deepspeed.utils``."""

from engine.data.loader import RepeatingLoader

__all__ = ["RepeatingLoader"]
