"""The config: what the user wrote, typed, checked and frozen. Imports no torch."""

from engine.config.config import Config
from engine.config.load import Examination, examine, load_config
from engine.config.messages import ConfigError, EngineError, Note, Problem

__all__ = ["Config", "ConfigError", "EngineError", "Examination", "Note", "Problem", "examine", "load_config"]
