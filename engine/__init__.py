"""A declarative, config-driven training engine for PyTorch.

    model_engine, optimizer, loader, scheduler = engine.initialize(model=model, config="run.json", training_data=data)

The public names are loaded on first use: importing this package (or `engine.config`, `engine.plan`) loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import Config, ConfigError, load_config
    from engine.contracts import EngineError, LossSum, PipelineError, RunFailed, StepReport, Watcher
    from engine.data.loader import RepeatingLoader
    from engine.engine import Engine
    from engine.entry import add_config_arguments, init_distributed, initialize
    from engine.model.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec

__version__ = "0.1.0"

_HOMES = {
    "Config": "engine.config",
    "ConfigError": "engine.config",
    "Engine": "engine.engine",
    "EngineError": "engine.contracts",
    "LossSum": "engine.contracts",
    "LayerSpec": "engine.model.pipeline.module",
    "PipelineError": "engine.contracts",
    "PipelineModule": "engine.model.pipeline.module",
    "RepeatingLoader": "engine.data.loader",
    "RunFailed": "engine.contracts",
    "StepReport": "engine.contracts",
    "TiedLayerSpec": "engine.model.pipeline.module",
    "Watcher": "engine.contracts",
    "add_config_arguments": "engine.entry",
    "init_distributed": "engine.entry",
    "initialize": "engine.entry",
    "load_config": "engine.config",
}

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "EngineError",
    "LayerSpec",
    "LossSum",
    "PipelineError",
    "PipelineModule",
    "RepeatingLoader",
    "RunFailed",
    "StepReport",
    "TiedLayerSpec",
    "Watcher",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name in ("zero", "utils", "pipe", "sequence"):  # DeepSpeed's names, for ``import engine as deepspeed``
        return importlib.import_module(f"engine.compat.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
