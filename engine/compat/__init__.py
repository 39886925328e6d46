"""DeepSpeed's names for this interface: ``import engine.compat as deepspeed``.

Thin: every name is one of ours. `engine` itself has those that are spelled alike, so most scripts need only
``import engine as deepspeed``.
"""

from engine.compat import pipe, sequence, utils, zero, zero_to_fp32
from engine.compat.pipe import PipelineModule
from engine.compat.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from engine.config import ConfigError as DeepSpeedConfigError
from engine.engine import Engine as DeepSpeedEngine
from engine.entry import add_config_arguments, init_distributed, initialize

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "PipelineModule",
    "add_config_arguments",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "init_distributed",
    "initialize",
    "load_state_dict_from_zero_checkpoint",
    "pipe",
    "sequence",
    "utils",
    "zero",
    "zero_to_fp32",
]
