"""Whole parameters, gradients and optimizer state by name, under any ZeRO stage (docs/full_state.md)."""

from engine.full_state.access import FullState
from engine.full_state.gathered import gathered
from engine.full_state.local import LocalState
from engine.full_state.owners import locate

__all__ = ["FullState", "LocalState", "gathered", "locate"]
