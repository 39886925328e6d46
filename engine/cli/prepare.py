"""What the commands that train have in common: the user's model, and the text, as the config names them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.resolved import data_path
from engine.contracts import EngineError

if TYPE_CHECKING:
    from engine.config import Config


def check_can_train(config: Config) -> None:
    """What `initialize()` from Python does not need and a run from the command line does."""
    check_has_model(config)
    if config.training.steps is None and config.training.num_epochs is None:
        where = config.source or "the config"
        raise EngineError(f"{where}: training.steps is missing; set it, or training.num_epochs")


def check_has_model(config: Config) -> None:
    """Raises EngineError where there is nothing to build, or a schedule that only Python can give."""
    where = config.source or "the config"
    if config.model is None or config.model.target is None:
        raise EngineError(f'{where}: model.target is missing; it says what to build, e.g. "model.py:GPT"')
    sections: dict[str, Any] = {}
    if config.curriculum_learning is not None:
        sections["curriculum_learning"] = config.curriculum_learning
    sampling = config.data_efficiency.data_sampling if config.data_efficiency is not None else None
    if sampling is not None and sampling.curriculum_learning is not None and sampling.curriculum_learning.enabled:
        sections |= sampling.curriculum_learning.curriculum_metrics
    for name, section in sections.items():
        if getattr(section, "enabled", True) and section.schedule_type == "custom":
            raise EngineError(
                f"{where}: {name}: schedule_type custom is a function of your own, which JSON cannot hold: train from "
                "Python and call engine.set_custom_curriculum_learning_schedule()"
            )


def config_base(config: Config) -> Path:
    """The folder from which the config's paths count."""
    return Path(config.source).resolve().parent if config.source else Path.cwd()


def open_corpus(config: Config, vocabulary_size: int | None = None) -> Any:
    """The text of ``data.path``. Token ids are checked against ``vocabulary_size`` where it is known."""
    from engine.data.sources import open_text

    data = config.data
    path = data_path(data.path, config_base(config))
    return open_text(path, data.sequence_length, data.validation_fraction, vocabulary_size)


def model_and_data(config: Config) -> tuple[Any, Any]:
    """The model, the same on every rank, and the text. Raises EngineError where either cannot be had."""
    import torch

    from engine.cli.target import bind_arguments, build_model, load_target

    assert config.model is not None
    target = load_target(str(config.model.target), config_base(config))
    corpus = open_corpus(config, vocabulary_size(config, bind_arguments(target, config.model.args)))
    torch.manual_seed(config.seed)
    return build_model(target, config.model.args), corpus


def vocabulary_size(config: Config, arguments: dict[str, Any]) -> int | None:
    """The vocabulary that token ids are checked against: the model's argument of that name, else the config's."""
    for name in ("vocabulary_size", "vocab_size"):
        if isinstance(arguments.get(name), int):
            return int(arguments[name])
    return config.vocabulary_size
