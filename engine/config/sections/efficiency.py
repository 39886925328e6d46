"""``curriculum_learning``, ``data_efficiency``, ``progressive_layer_drop``."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import PRESENT, Fault, Section, when
from engine.config.sections.routing import DataRoutingSection

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
SEQUENCE_METRICS = ("seqlen", "seqlen_truncate", "seqlen_reshape")
"""Difficulties that are sequence lengths, to which the batch is cut."""
_REQUIRED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduleSection(Section):
    """Arguments of a difficulty schedule."""

    ignored_by_deepspeed: ClassVar[bool] = True

    total_curriculum_step: int | None = Field(None, ge=1, description="Steps until the maximum is reached.")
    difficulty_step: int | None = Field(None, ge=1, description="Difficulties are multiples of this.")
    root_degree: float | None = Field(None, gt=0, description="Degree of the root, for fixed_root.")
    difficulty: list[int | float] | None = Field(None, description="The difficulties, for fixed_discrete.")
    max_step: list[int] | None = Field(None, description="Last step of each difficulty but the last.")


def _schedule_faults(section: Any) -> Iterator[Fault]:
    for key in ("min_difficulty", "max_difficulty", "schedule_type"):
        if getattr(section, key) is None:
            yield Fault(key, "is missing")
    low, high = section.min_difficulty, section.max_difficulty
    if low is not None and high is not None and low > high:
        yield Fault(
            "min_difficulty",
            f"{low} is above max_difficulty {high}",
            f"at most {high}",
            depends=("max_difficulty",),
        )
        return
    config = section.schedule_config or CurriculumScheduleSection()
    for key in _REQUIRED.get(section.schedule_type or "", ()):
        if getattr(config, key) is None:
            yield Fault(f"schedule_config.{key}", f"is missing, and schedule_type is {section.schedule_type}")
    if section.schedule_type == "fixed_discrete" and config.difficulty is not None and config.max_step is not None:
        wanted = len(config.difficulty) - 1
        if len(config.max_step) != wanted:
            yield Fault(
                "schedule_config.max_step",
                f"has {len(config.max_step)} entries for {len(config.difficulty)} difficulties",
                f"{wanted}: one less than difficulty",
                depends=("schedule_config.difficulty",),
            )
    if section.compat is None and low is not None and high is not None:
        yield from _unreachable(section.schedule_type, config, low, high)


def _unreachable(
    schedule_type: str | None, config: CurriculumScheduleSection, low: float, high: float
) -> Iterator[Fault]:
    """Difficulties that the schedule can never have, or may not: DeepSpeed takes them and does something else."""
    deepspeed = '"compat": "deepspeed" does what DeepSpeed does'
    size = config.difficulty_step
    if schedule_type in ("fixed_linear", "fixed_root") and size is not None:
        for key, value in (("min_difficulty", low), ("max_difficulty", high)):
            if value % size:
                below = value // size * size
                fits = f"{below:g} or {below + size:g}" if below else f"{size}"
                yield Fault(
                    "schedule_config.difficulty_step",
                    f"{size} does not divide {key} {value}: {value} = {value // size:g} x {size} + {value % size:g}",
                    f"a divisor of {value}",
                    f"set {key} to {fits}, or difficulty_step to a divisor; {deepspeed}",
                    depends=(key,),
                )
    if schedule_type == "fixed_discrete" and config.difficulty:
        least, largest = min(config.difficulty), max(config.difficulty)
        where, ends = "schedule_config.difficulty", ("min_difficulty", "max_difficulty")
        if largest > high:
            message = f"holds {largest}, which is never reached: max_difficulty is {high}"
            yield Fault(where, message, f"at most {high}", f"raise max_difficulty; {deepspeed}", depends=ends)
        if least < low:
            message = f"holds {least}, which is never used: min_difficulty is {low}"
            yield Fault(where, message, f"at least {low}", f"lower min_difficulty; {deepspeed}", depends=ends)
        if largest < high:
            message = f"{high} is never reached: the largest of {where} is {largest}"
            yield Fault("max_difficulty", message, f"{largest}", deepspeed, depends=(where,))
        steps = config.max_step or []
        if any(later <= earlier for earlier, later in pairwise(steps)):
            yield Fault("schedule_config.max_step", f"{steps} does not ascend", "steps in ascending order")


_SCHEDULE_RULES: tuple[dict[str, Any], ...] = (
    {
        "required": ["min_difficulty", "max_difficulty", "schedule_type"],
        "properties": dict.fromkeys(("min_difficulty", "max_difficulty", "schedule_type"), PRESENT),
    },
    *(
        when(
            "schedule_type",
            name,
            required=["schedule_config"],
            properties={
                "schedule_config": {
                    "type": "object",
                    "required": list(keys),
                    "properties": dict.fromkeys(keys, PRESENT),
                }
            },
        )
        for name, keys in _REQUIRED.items()
        if keys
    ),
)


class CurriculumLearningSection(Section):
    """From easy to hard: DeepSpeed's older form, by sequence length."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when(
            "enabled",
            True,
            properties={"curriculum_type": {"enum": list(SEQUENCE_METRICS)}},
            allOf=list(_SCHEDULE_RULES),
        ),
    )

    enabled: bool = Field(False, description="Use the curriculum.")
    curriculum_type: str = Field(
        "seqlen",
        description='"seqlen" or "seqlen_truncate": only the first tokens of each sequence are used; "seqlen_reshape": '
        "each sequence becomes several shorter ones, and no token is lost.",
    )
    min_difficulty: int | None = Field(None, ge=1, description="Difficulty at the start.")
    max_difficulty: int | None = Field(None, ge=1, description="Difficulty at the end.")
    schedule_type: ScheduleType | None = Field(None, description="How difficulty grows.")
    schedule_config: CurriculumScheduleSection | None = Field(None, description="Arguments of the schedule.")
    compat: Literal["deepspeed"] | None = Field(
        None, description='"deepspeed": difficulties as DeepSpeed computes them, which may miss both ends.'
    )

    def faults(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        if self.curriculum_type not in SEQUENCE_METRICS:
            yield Fault(
                "curriculum_type",
                f'"{self.curriculum_type}" has no effect in DeepSpeed',
                " or ".join(f'"{name}"' for name in SEQUENCE_METRICS),
                "other metrics belong in data_efficiency.data_sampling.curriculum_learning",
            )
        yield from _schedule_faults(self)


class CurriculumMetricSection(Section):
    """One measure of difficulty."""

    ignored_by_deepspeed: ClassVar[bool] = True

    function: str | None = Field(
        None,
        description='What `ptrain analyze` measures: "file.py:function" or "package.module:function", from a batch of '
        'samples to one integer each; null: a built-in metric of the name ("seqlen", "vocabularyrarity").',
    )
    index_to_sample_path: str | None = Field(
        None, description="The file index_to_sample.npy of this metric; null: under data_cluster_path."
    )
    index_to_metric_path: str | None = Field(
        None, description="The file index_to_metric.npy of this metric; null: under data_cluster_path."
    )
    difficulty_type: Literal["value", "percentile"] = Field("value", description="What the difficulty counts.")
    clustering_type: Literal["schedule_based", "single_cluster"] = Field(
        "schedule_based", description="How samples are grouped."
    )
    min_difficulty: int | float | None = Field(None, description="Difficulty at the start.")
    max_difficulty: int | float | None = Field(None, description="Difficulty at the end.")
    schedule_type: ScheduleType | None = Field(None, description="How difficulty grows.")
    schedule_config: CurriculumScheduleSection | None = Field(None, description="Arguments of the schedule.")
    compat: Literal["deepspeed"] | None = Field(
        None, description='"deepspeed": difficulties as DeepSpeed computes them, which may miss both ends.'
    )


class SamplingCurriculumSection(Section):
    """From easy to hard, by any metrics."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when(
            "enabled",
            True,
            required=["data_cluster_path", "curriculum_metrics"],
            properties={
                "data_cluster_path": {"type": "string", "minLength": 1},
                "curriculum_metrics": {"minProperties": 1, "additionalProperties": {"allOf": list(_SCHEDULE_RULES)}},
            },
        ),
    )

    enabled: bool = Field(False, description="Use the curriculum.")
    data_cluster_path: str | None = Field(None, description="Folder of the index that `ptrain analyze` writes.")
    curriculum_metrics: dict[str, CurriculumMetricSection] = Field({}, description="One object per metric.")

    def faults(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        if not self.data_cluster_path:
            yield Fault("data_cluster_path", "is missing", "a folder")
        if not self.curriculum_metrics:
            yield Fault("curriculum_metrics", "is empty, and the curriculum is enabled", "at least one metric")
        for name, metric in self.curriculum_metrics.items():
            for fault in _schedule_faults(metric):
                above = f"curriculum_metrics.{name}."
                yield fault._replace(key=above + fault.key, depends=tuple(above + key for key in fault.depends))


class DynamicBatchingSection(Section):
    """As many samples per batch as a token budget allows."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when("enabled", True, required=["max_tokens"], properties={"max_tokens": PRESENT}),
    )

    enabled: bool = Field(False, description="Vary the batch size.")
    metrics_path: str | None = Field(None, description="File of sequence lengths.")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = Field("linear", description="How lr follows the batch size.")
    min_batch_size: int = Field(1, ge=1, description="Samples at least.")
    max_batch_size: int | None = Field(None, ge=1, description="Samples at most.")
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = Field(
        "dataloader", description="Order of samples."
    )
    max_tokens: int | None = Field(None, ge=1, description="Tokens per batch.")
    verbose: bool = Field(False, description="Print the batches.")

    def faults(self) -> Iterator[Fault]:
        if self.enabled and self.max_tokens is None:
            yield Fault("max_tokens", "is missing, and dynamic batching is enabled", "an integer >= 1")


class DataSamplingSection(Section):
    """Which samples are drawn."""

    ignored_by_deepspeed: ClassVar[bool] = True

    enabled: bool = Field(False, description="DeepSpeed does not read it: the inner switches count.")
    num_epochs: int = Field(1000, ge=1, description="Passes over the data that the sampler plans for.")
    num_workers: int = Field(0, ge=0, description="Loader processes per rank.")
    pin_memory: bool = Field(False, description="Page-locked memory for batches.")
    curriculum_learning: SamplingCurriculumSection | None = Field(None, description="From easy to hard.")
    dynamic_batching: DynamicBatchingSection | None = Field(None, description="Batches by tokens.")


class DataEfficiencySection(Section):
    """Curricula over samples, and token dropping."""

    ignored_by_deepspeed: ClassVar[bool] = True

    enabled: bool = Field(False, description="DeepSpeed does not read it: the inner switches count.")
    seed: int = Field(1234, ge=0, description="Seed of the sampler.")
    data_sampling: DataSamplingSection | None = Field(None, description="Which samples are drawn.")
    data_routing: DataRoutingSection | None = Field(None, description="Which tokens pass through which layers.")


class ProgressiveLayerDropSection(Section):
    """Layers are skipped at random, more of them as training goes on."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Drop layers.")
    theta: float = Field(0.5, gt=0, le=1, description="Keep probability of the last layer that is approached.")
    gamma: float = Field(0.001, ge=0, description="Speed of the approach, per step.")
    compat: Literal["deepspeed"] | None = Field(
        None,
        description='"deepspeed": scale kept layers as its example does, by another probability than they are drawn '
        "with, and count steps as it does.",
    )
