"""The config: what the user wrote, typed, checked and frozen. Imports no torch, and pydantic only to read a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config.messages import ConfigError, EngineError, Note, Problem

if TYPE_CHECKING:
    from engine.config.config import Config
    from engine.config.examination import Examination
    from engine.config.load import examine, load_config

__all__ = ["Config", "ConfigError", "EngineError", "Examination", "Note", "Problem", "examine", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from engine.config.config import Config

        return Config
    if name == "Examination":
        from engine.config.examination import Examination

        return Examination
    if name in ("examine", "load_config"):
        from engine.config import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
