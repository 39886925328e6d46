"""``checkpoint``."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, create_model

from engine.config.sections.base import Section, nested


class ParallelWriteSection(Section):
    """Who writes what."""

    ignored_by_deepspeed: ClassVar[bool] = True

    pipeline_stage: bool = Field(False, description="Spread a stage's layer files over its data-parallel ranks.")


class WriterSection(Section):
    """DeepSpeed's fast writer."""

    type: Literal["MOCK", "PYTHON", "FAST"] = Field("FAST", description="Which writer.")
    io_buffer_size: int = Field(64 * 2**20, ge=1, description="Buffer, in bytes.")
    io_buffer_double: bool = Field(True, description="Two buffers that take turns.")
    show_statistics: bool = Field(False, description="Print write statistics.")
    data_parallel: Literal["REPLICA", "SOCKET", "MACHINE"] | None = Field(None, description="Who shares the writing.")
    decoupled: bool = Field(False, description="Write in the background, commit at the next boundary.")
    io_multiplier: int = Field(1, ge=1, description="Writers per rank.")


class _WithoutKeyword(Section):
    """How checkpoints are written and read."""

    ignored_by_deepspeed: ClassVar[bool] = True

    keep_last: int | None = Field(None, ge=1, description="Keep the last so many checkpoints; null: no such rule.")
    keep_every: int | None = Field(None, ge=1, description="Keep those at multiples of so many steps.")
    keep_best: int | None = Field(None, ge=1, description="Keep so many of the lowest validation loss.")
    verify: bool = Field(True, description="Compare the files with their hashes before they are loaded.")
    rank_timeout_seconds: float = Field(
        60.0, gt=0, description="How long a save or load waits for ranks that have not called it."
    )
    tag_validation: Literal["Ignore", "Warn", "Fail"] = Field("Warn", description="When ranks disagree about a tag.")
    load_universal: bool = Field(
        False, description="Load a converted checkpoint; here every checkpoint loads anywhere."
    )
    use_node_local_storage: bool = Field(False, description="Local rank 0 of every node writes.")
    parallel_write: ParallelWriteSection = nested(ParallelWriteSection, "Who writes what.")
    checkpoint_serialization: bool = Field(True, description="Torch's zip format for DeepSpeed's fast writer.")
    writer: WriterSection | None = Field(None, description="DeepSpeed's fast writer.")


if TYPE_CHECKING:

    class CheckpointSection(_WithoutKeyword):
        pass

else:
    # "async" is a word of Python's: a class body cannot declare it
    CheckpointSection = create_model(
        "CheckpointSection",
        __base__=_WithoutKeyword,
        __module__=__name__,
        __doc__=_WithoutKeyword.__doc__,
        **{"async": (bool, Field(False, description="Write in the background while training goes on."))},
    )
