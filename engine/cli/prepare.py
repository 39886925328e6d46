"""What the commands that build the user's model or read the text have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.resolved import data_path
from engine.contracts import EngineError

if TYPE_CHECKING:
    from engine.config import Config


def check_has_model(config: Config) -> None:
    """Raises EngineError where there is nothing to build, or a schedule that only Python can give."""
    where = config.source or "the config"
    if config.model is None or config.model.target is None:
        raise EngineError(f'{where}: model.target is missing; it says what to build, e.g. "model.py:GPT"')
    sections: dict[str, Any] = {}
    if config.curriculum_learning is not None and config.curriculum_learning.enabled:
        sections["curriculum_learning"] = config.curriculum_learning
    sampling = config.data_efficiency.data_sampling if config.data_efficiency is not None else None
    if sampling is not None and sampling.curriculum_learning is not None and sampling.curriculum_learning.enabled:
        sections |= sampling.curriculum_learning.curriculum_metrics
    for name, section in sections.items():
        if section.schedule_type == "custom":
            raise EngineError(
                f"{where}: {name}: schedule_type custom is a function of your own, which JSON cannot hold: train from "
                "Python and call engine.set_custom_curriculum_learning_schedule()"
            )


def base_of(config: Config) -> Path:
    """The folder from which the config's paths count."""
    return Path(config.source).resolve().parent if config.source else Path.cwd()


def open_corpus(config: Config, vocabulary_size: int | None = None) -> Any:
    """The text of ``data.path``. Token ids are checked against ``vocabulary_size`` where it is known."""
    from engine.data.sources import open_text

    data = config.data
    return open_text(
        data_path(data.path, base_of(config)), data.sequence_length, data.validation_fraction, vocabulary_size
    )
