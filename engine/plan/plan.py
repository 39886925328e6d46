"""The Plan: what a config means for one world. Frozen, printable, free of torch.

`engine.plan.plan` makes it; build.py and the roles read it and nothing else of the config's arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from engine.plan.placement import AXES

if TYPE_CHECKING:
    from engine.config import Config, Note
    from engine.plan.facts import ModelFacts

Dtype = Literal["fp32", "bf16", "fp16"]
Origin = Literal["user", "default", "auto", "derived"]


@dataclass(frozen=True)
class World:
    """The ranks that exist. ``device`` is a torch device type; ``device_count`` accelerators are seen per node."""

    size: int = 1
    local_size: int = 1
    device: str = "cpu"
    device_count: int = 0
    how: str = ""
    """How the size was found, as a clause for messages: "torchrun variables", "no process group was found"."""
    split_by_caller: int = 1
    """Ranks over which the caller has split the model already (mpu): they get the same samples."""
    placement_of_caller: str = ""
    """Where those ranks stand."""


@dataclass(frozen=True)
class Degrees:
    """The mesh axes. Their product is the world size (of a plan without problems); ``dp`` = dp_replicate x dp_shard."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    placement: str = "PDT"
    """The order of the axes, see `engine.plan.placement`."""
    split_by_caller: bool = False
    """The tp ranks hold what the caller has split (mpu), not what the engine splits."""

    @property
    def by_axis(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def slices(self) -> int:
        """Into how many slices a sequence is cut: cp x sp."""
        return self.cp * self.sp

    @property
    def model(self) -> int:
        """Ranks that work on the same samples: pp x cp x sp x tp."""
        return self.pp * self.cp * self.sp * self.tp

    @property
    def size(self) -> int:
        return self.dp * self.model


@dataclass(frozen=True)
class BatchPlan:
    """``global_batch_size == micro_batch_size * accumulation_steps * dp``, in samples."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    managed: bool = True
    """False: every `engine.step()` is a boundary and gradients are summed, not averaged, over micro-batches."""


@dataclass(frozen=True)
class LossScalePlan:
    """``static`` > 0 fixes the scale; else it is dynamic (DeepSpeed's rule, see engine/optim/loss_scaler.py)."""

    static: float = 1.0
    initial: float = 1.0
    window_steps: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    @property
    def dynamic(self) -> bool:
        return self.static == 0.0


@dataclass(frozen=True)
class PrecisionPlan:
    """``compute``: the dtype parameters and floating inputs have in forward. ``accumulate``: of the gradients between
    micro-batches. ``reduce``: of the gradients on the wire. ``buffers``: None leaves buffers as they are."""

    compute: Dtype = "fp32"
    autocast: Dtype | None = None
    accumulate: Dtype = "fp32"
    reduce: Dtype = "fp32"
    buffers: Dtype | None = None
    loss_scale: LossScalePlan = field(default_factory=LossScalePlan)
    check_overflow: bool = True


@dataclass(frozen=True)
class ZeroPlan:
    """``reshard_after_forward``: stage 3 only; an int is the size of the secondary group (hpZ).

    ``bucket_elements``: gradients are reduced in buckets of at most this many elements (stages 0 to 2).
    ``group_elements``: consecutive blocks are gathered together until a group holds this many (stage 3).
    ``whole_groups``: a bucket holds a whole parameter group, whatever ``bucket_elements`` says.
    ``predivide_factor``: gradients are divided by it before the reduction and by dp / factor after it.
    """

    stage: int = 0
    bucket_elements: int = 0
    whole_groups: bool = False
    group_elements: int = 0
    reshard_after_forward: bool | int = False
    predivide_factor: float = 1.0
    reduce_op: Literal["mean", "sum"] = "mean"


@dataclass(frozen=True)
class OptimizerPlan:
    """``type`` is the canonical name (torch.optim's, ours, or a dotted path); ``params`` go to its constructor."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SchedulePlan:
    """``type``: WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle or a torch.optim.lr_scheduler class."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DifficultySchedule:
    """How a difficulty grows with the step, which counts from 1: engine/data/curriculum.py has the formulas.

    ``difficulties`` hold until ``last_steps`` (one fewer) and belong to fixed_discrete; ``total_steps``, ``step_size``
    and ``root_degree`` to the other two. ``deepspeed``: its formulas, which may miss the minimum and the maximum.
    """

    type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
    minimum: float
    maximum: float
    total_steps: int = 1
    step_size: int = 1
    root_degree: float = 1.0
    difficulties: tuple[float, ...] = ()
    last_steps: tuple[int, ...] = ()
    deepspeed: bool = False


@dataclass(frozen=True)
class CurriculumMetric:
    """``use``: the difficulty is the length to which sequences are cut (truncate, reshape), or a bound on the samples
    that may be drawn (sample), then by ``percentile`` of the sorted metric or by its value. ``path``: of its section.
    """

    name: str
    path: str
    use: Literal["truncate", "reshape", "sample"]
    schedule: DifficultySchedule
    percentile: bool = False
    index_to_sample_path: str | None = None
    index_to_metric_path: str | None = None


@dataclass(frozen=True)
class CurriculumPlan:
    """At most one of the ``metrics`` cuts. ``index_path``: where the samples' metrics are. ``seed``: of drawing."""

    metrics: tuple[CurriculumMetric, ...]
    index_path: str | None = None
    seed: int = 1234

    @property
    def cutting(self) -> CurriculumMetric | None:
        return next((metric for metric in self.metrics if metric.use != "sample"), None)

    @property
    def sampled(self) -> tuple[CurriculumMetric, ...]:
        return tuple(metric for metric in self.metrics if metric.use == "sample")


@dataclass(frozen=True)
class LayerDropPlan:
    """``theta``: what the keep probability of the last layer approaches; ``gamma``: how fast, per step that updates.

    ``deepspeed``: sample, scale and count steps as DeepSpeed and its example do (engine/model/layer_drop.py).
    """

    theta: float
    gamma: float
    deepspeed: bool = False


@dataclass(frozen=True)
class TokenDropPlan:
    """``schedule``: the tokens that a layer keeps, by the steps that have updated the model, from 0.

    ``layers``: those that drop tokens; None: all but the first and the last, ``num_dropping`` of them where that is
    given. ``num_layers``: how many blocks the model has to have.
    """

    schedule: DifficultySchedule
    layers: tuple[int, ...] | None = None
    num_dropping: int | None = None
    num_layers: int | None = None
    order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"
    mask_name: str | None = None


@dataclass(frozen=True)
class PipelinePlan:
    """How the model's depth is spread over the pipeline ranks (`Degrees.pp`), ``virtual_stages`` parts on each.

    ``partition``: "parameters", "uniform", "type:REGEX" or how many layers each stage holds. ``num_micro_batches``: of
    a window on one data-parallel rank; a multiple of the accumulation steps, whose micro-batches are then cut further.
    """

    schedule: str
    partition: str | tuple[int, ...]
    num_micro_batches: int
    virtual_stages: int = 1


@dataclass(frozen=True)
class Resolved:
    """One resolved value and why it has it. ``path`` is the JSON path, ``reason`` one plain sentence or ''."""

    path: str
    value: Any
    origin: Origin
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything build.py needs.

    ``optimizer`` and ``schedule`` are None where the JSON has none: the client may bring one. ``facts``: the model's,
    where they were known.
    """

    config: Config
    world: World
    degrees: Degrees
    batch: BatchPlan
    precision: PrecisionPlan
    zero: ZeroPlan
    gradient_clipping: float
    optimizer: OptimizerPlan | None
    schedule: SchedulePlan | None
    seed: int
    curriculum: CurriculumPlan | None = None
    layer_drop: LayerDropPlan | None = None
    token_drop: TokenDropPlan | None = None
    pipeline: PipelinePlan | None = None
    values: tuple[Resolved, ...] = ()
    notes: tuple[Note, ...] = ()
    facts: ModelFacts | None = None

    @property
    def shard_size(self) -> int:
        """Among how many ranks ZeRO cuts: those of dp_shard, from stage 1 on with the slices of a sequence."""
        return self.degrees.dp_shard * (self.degrees.slices if self.zero.stage else 1)

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same of what ZeRO cuts."""
        return self.degrees.dp_replicate * (1 if self.zero.stage else self.degrees.slices)

    @property
    def block_path(self) -> str | None:
        """The container of the model's repeated blocks, where the config names it."""
        return self.config.model.blocks if self.config.model else None

    def render(self, columns: int = 120) -> str:
        """The plan as text for people, in lines of at most so many columns where words allow."""
        from engine.plan.render import render_plan

        return render_plan(self, columns)
