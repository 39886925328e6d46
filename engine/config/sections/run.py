"""This engine's own sections, read by ``ptrain``: ``model``, ``data``, ``training``, ``parallel``."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import Section


class ModelSection(Section):
    """What to build."""

    shorthand: ClassVar[str] = "target"

    target: str | None = Field(
        None,
        description='A class or function that builds the model: "package.module:Attr", "package.module.Attr", or '
        '"file.py:Attr" beside the config file.',
    )
    args: dict[str, Any] = Field({}, description="Keyword arguments of target.")
    blocks: str | None = Field(None, description='Where the repeated blocks are, e.g. "transformer.h"; null: found.')
    tiny: dict[str, Any] = Field({}, description="Arguments that replace those in args for a quick trial of the model.")


class DataSection(Section):
    """What to train on."""

    shorthand: ClassVar[str] = "path"

    path: str | None = Field(
        None,
        description="A text file, a folder, or a .bin file of token ids; null: the Python standard library's source.",
    )
    sequence_length: int = Field(128, ge=1, description="Tokens per sample.")
    num_workers: int = Field(0, ge=0, description="Loader processes per rank.")
    validation_fraction: float = Field(0.1, ge=0, lt=1, description="Share of the files kept for evaluation.")


class TrainingSection(Section):
    """How long to train, and what happens on the way."""

    shorthand: ClassVar[str] = "steps"

    steps: int | None = Field(None, ge=1, description="Optimizer steps to take.")
    num_epochs: float | None = Field(None, gt=0, description="Passes over the data, where steps is not given.")
    eval_interval: int | None = Field(None, ge=1, description="Steps between evaluations; null: only at the end.")
    eval_batches: int | None = Field(None, ge=1, description="Batches per evaluation; null: all.")
    save_interval: int | None = Field(None, ge=1, description="Steps between checkpoints; null: only at the end.")
    sample_length: int = Field(200, ge=0, description="Characters of sample text at the end.")


class ParallelSection(Section):
    """What DeepSpeed leaves to code."""

    placement: Literal["PDT", "PTD", "DPT", "DTP", "TPD", "TDP"] = Field(
        "PDT", description="Order of pipeline, data and tensor ranks, outermost first: neighbours differ in the last."
    )
    context_parallel: int = Field(1, ge=1, description="Ranks that share each sequence by ring attention.")
