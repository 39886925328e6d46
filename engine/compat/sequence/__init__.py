"""What scripts find under ``deepspeed.sequence``."""

from engine.compat.sequence import layer

__all__ = ["layer"]
