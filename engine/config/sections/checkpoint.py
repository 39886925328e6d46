"""``checkpoint``."""

from typing import ClassVar, Literal

from pydantic import Field

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


class CheckpointSection(Section):
    """How checkpoints are written and read."""

    ignored_by_deepspeed: ClassVar[bool] = True

    tag_validation: Literal["Ignore", "Warn", "Fail"] = Field("Warn", description="When ranks disagree about a tag.")
    load_universal: bool = Field(
        False, description="Load a converted checkpoint; here every checkpoint loads anywhere."
    )
    use_node_local_storage: bool = Field(False, description="Local rank 0 of every node writes.")
    parallel_write: ParallelWriteSection = nested(ParallelWriteSection, "Who writes what.")
    checkpoint_serialization: bool = Field(True, description="Torch's zip format for DeepSpeed's fast writer.")
    writer: WriterSection | None = Field(None, description="DeepSpeed's fast writer.")
