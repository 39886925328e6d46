"""What only watches: ``tensorboard``, ``wandb``, ``csv_monitor``, ``comet``, ``timers``, ``flops_profiler``,
``comms_logger``."""

from typing import ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import Section, nested


class TensorboardSection(Section):
    """TensorBoard event files, written by rank 0. The x axis is the number of samples."""

    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Write TensorBoard events.")
    output_path: str = Field("", description="Folder; relative ones lie under the run's output folder.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-folder of output_path.")


class WandbSection(Section):
    """Weights & Biases, written by rank 0. Offline mode needs no account."""

    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Log to Weights & Biases.")
    group: str | None = Field(None, description="Group of runs.")
    team: str | None = Field(None, description="Entity that owns the project.")
    project: str = Field("deepspeed", description="Project name.")


class CsvMonitorSection(Section):
    """One CSV file per scalar, written by rank 0."""

    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Write CSV files.")
    output_path: str = Field("", description="Folder; relative ones lie under the run's output folder.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-folder of output_path.")


class CometSection(Section):
    """Comet."""

    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Log to Comet.")
    samples_log_interval: int = Field(100, ge=1, description="Samples between points of one metric.")
    project: str | None = Field(None, description="Project name.")
    workspace: str | None = Field(None, description="Workspace name.")
    api_key: str | None = Field(None, description="Better left to the environment than written in a file.")
    experiment_name: str | None = Field(None, description="Name of the experiment.")
    experiment_key: str | None = Field(None, description="Key of an experiment to continue.")
    online: bool | None = Field(None, description="false: write locally, upload later.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(None, description="How the experiment is opened.")


class ThroughputTimerSection(Section):
    """The timer behind the printed samples per second."""

    enabled: bool = Field(True, description="Measure throughput.")
    synchronized: bool = Field(True, description="Wait for the device before each reading.")


class TimersSection(Section):
    """Timers."""

    ignored_by_deepspeed: ClassVar[bool] = True

    throughput: ThroughputTimerSection = nested(ThroughputTimerSection, "Throughput timer.")


class FlopsProfilerSection(Section):
    """Counts floating-point operations, parameters and latency per module in one step."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Profile one step.")
    recompute_fwd_factor: float = Field(0.0, ge=0, description="Extra forwards per step that recomputation costs.")
    profile_step: int = Field(1, ge=-1, description="The step to profile.")
    module_depth: int = Field(-1, ge=-1, description="Depth of modules to print; -1: the innermost.")
    top_modules: int = Field(1, ge=1, description="Modules to print per depth.")
    detailed: bool = Field(True, description="Print the table of modules.")
    output_file: str | None = Field(None, description="Write to this file rather than print.")


class CommsLoggerSection(Section):
    """Logs every collective with its size, time and bandwidth. In DeepSpeed the section's mere presence switches it
    on."""

    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Log collectives.")
    verbose: bool = Field(False, description="Print each collective as it happens.")
    prof_all: bool = Field(True, description="Log all kinds of collectives.")
    debug: bool = Field(False, description="Also say which function called.")
    prof_ops: list[str] = Field([], description="Kinds to log when prof_all is false.")
