"""DeepSpeed's names for this interface: ``import engine.compat as deepspeed``.

Thin: every name is one of ours. `engine` itself has those that are spelled alike, so most scripts need only
``import engine as deepspeed``.
"""

from engine.compat import utils, zero
from engine.config import ConfigError as DeepSpeedConfigError
from engine.engine import Engine as DeepSpeedEngine
from engine.entry import add_config_arguments, init_distributed, initialize

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "utils",
    "zero",
]
