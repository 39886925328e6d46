"""How ranks come to be: read from torchrun's or SLURM's environment, or started here as fresh interpreters."""

from engine.launch.environment import RankEnvironment
from engine.launch.signals import StopRequest

__all__ = ["RankEnvironment", "StopRequest"]
