"""`Config`: the whole file, typed and frozen. Attributes are the JSON keys; defaults are DeepSpeed's."""

import copy
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from engine.config.messages import Note
from engine.config.places import Path, Places, join_path, parse_path, step
from engine.config.sections.base import Section, nested
from engine.config.sections.checkpoint import CheckpointSection
from engine.config.sections.compression import CompressionTrainingSection
from engine.config.sections.efficiency import (
    CurriculumLearningSection,
    DataEfficiencySection,
    ProgressiveLayerDropSection,
)
from engine.config.sections.monitor import (
    CometSection,
    CommsLoggerSection,
    CsvMonitorSection,
    FlopsProfilerSection,
    TensorboardSection,
    TimersSection,
    WandbSection,
)
from engine.config.sections.optimizer import OptimizerSection, SchedulerSection
from engine.config.sections.other import (
    ActivationCheckpointingSection,
    CompileSection,
    ElasticitySection,
    SparseAttentionSection,
)
from engine.config.sections.parallel import ExpertParallelSection, PipelineSection, TensorParallelSection
from engine.config.sections.precision import (
    AmpSection,
    Bf16Section,
    DataTypesSection,
    DtypeName,
    Fp16Section,
    TorchAutocastSection,
)
from engine.config.sections.run import DataSection, ModelSection, ParallelSection, TrainingSection
from engine.config.sections.services import (
    AutotuningSection,
    EigenvalueSection,
    HybridEngineSection,
    NebulaSection,
    WeightQuantizationSection,
)
from engine.config.sections.smp import SmpSection
from engine.config.sections.zero import AioSection, ZeroSection

Origin = Literal["user", "default", "auto"]


@dataclass
class Provenance:
    """Where a config's values came from; kept beside the values, not part of them."""

    source: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    autos: frozenset[str] = frozenset()
    supplied: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()


class Config(Section):
    """One training configuration. Made by `engine.config.load_config`; equal to its JSON one to one."""

    ignored_by_deepspeed: ClassVar[bool] = True

    # batch
    train_batch_size: int | None = Field(None, ge=1, description="Samples per optimizer step, over all ranks.")
    train_micro_batch_size_per_gpu: int | None = Field(None, ge=1, description="Samples per forward on one rank.")
    gradient_accumulation_steps: int | None = Field(None, ge=1, description="Micro-batches per optimizer step.")
    managed_gradient_accumulation: bool = Field(
        True, description="The engine counts micro-batches; false: every step() updates."
    )
    dataloader_drop_last: bool = Field(False, description="Drop the last incomplete batch of an epoch.")
    vocabulary_size: int | None = Field(None, ge=1, description="Only checked: multiples of 8 are faster.")

    # optimizer
    optimizer: OptimizerSection | None = Field(None, description="The optimizer; null: the caller brings one.")
    scheduler: SchedulerSection | None = Field(None, description="The learning-rate schedule; null: constant.")
    gradient_clipping: float = Field(
        1.0, ge=0, description="Largest global L2 norm of the gradients; 0: no clipping. Clipping is on by default."
    )
    zero_allow_untested_optimizer: bool = Field(
        False, description="DeepSpeed's guard; every optimizer here is allowed."
    )
    zero_force_ds_cpu_optimizer: bool = Field(True, description="Offloading needs DeepSpeed's own CPU optimizer.")

    # precision
    fp16: Fp16Section = nested(Fp16Section, "Half precision with loss scaling.")
    bf16: Bf16Section = nested(Bf16Section, "bfloat16 compute.")
    torch_autocast: TorchAutocastSection = nested(TorchAutocastSection, "torch.autocast.")
    amp: AmpSection = nested(AmpSection, "Apex AMP.")
    data_types: DataTypesSection = nested(DataTypesSection, "Other dtypes.")

    # communication
    communication_data_type: DtypeName | None = Field(
        None, description="Dtype of gradient reduction; null: see the plan."
    )
    seq_parallel_communication_data_type: DtypeName = Field("fp32", description="The same under sequence parallelism.")
    prescale_gradients: bool = Field(
        False, description="Divide by the number of ranks before the reduction, not after."
    )
    gradient_predivide_factor: float = Field(1.0, gt=0, description="Part of that division that happens before.")
    gradient_allreduce_op: Literal["mean", "sum"] = Field("mean", description="sum: gradients are not averaged.")
    sparse_gradients: bool = Field(False, description="Reduce embedding gradients as sparse tensors.")
    disable_allgather: bool = Field(False, description="Accepted; DeepSpeed does not read it either.")
    graph_harvesting: bool = Field(False, description="CUDA graphs in DeepSpeed's bf16 optimizer; no effect here.")

    # sharding and parallelism
    zero_optimization: ZeroSection = nested(ZeroSection, "ZeRO.")
    aio: AioSection = nested(AioSection, "Disk access.")
    activation_checkpointing: ActivationCheckpointingSection | None = Field(None, description="Recomputation.")
    pipeline: PipelineSection | None = Field(None, description="Pipeline parallelism.")
    tensor_parallel: TensorParallelSection | None = Field(None, description="Tensor parallelism.")
    sequence_parallel_size: int = Field(1, ge=1, description="Ranks that share each sequence (Ulysses).")
    data_parallel_size: int | None = Field(None, ge=1, description="Ranks that hold different samples.")
    expert_parallel: ExpertParallelSection | None = Field(None, description="Expert parallelism.")
    use_data_before_expert_parallelism: bool = Field(False, description="Rank order: data before experts.")
    smp: SmpSection | None = Field(None, description="Parameters of SageMaker's model parallel library.")
    parallel: ParallelSection = nested(ParallelSection, "Placement of ranks, context parallelism.")

    # data and layers
    curriculum_learning: CurriculumLearningSection | None = Field(None, description="Curriculum by sequence length.")
    data_efficiency: DataEfficiencySection | None = Field(None, description="Curricula, token dropping.")
    progressive_layer_drop: ProgressiveLayerDropSection | None = Field(None, description="Layer dropping.")
    sparse_attention: SparseAttentionSection | None = Field(None, description="Block-sparse attention.")
    compression_training: CompressionTrainingSection | None = Field(None, description="Quantization, pruning.")
    compile: CompileSection | None = Field(None, description="DeepCompile.")
    elasticity: ElasticitySection | None = Field(None, description="Batch sizes for changing world sizes.")

    # watching
    tensorboard: TensorboardSection = nested(TensorboardSection, "TensorBoard.")
    wandb: WandbSection = nested(WandbSection, "Weights & Biases.")
    csv_monitor: CsvMonitorSection = nested(CsvMonitorSection, "CSV files.")
    comet: CometSection = nested(CometSection, "Comet.")
    steps_per_print: int | None = Field(
        None, ge=1, description="Steps between printed lines; null: DeepSpeed prints none."
    )
    wall_clock_breakdown: bool = Field(False, description="Time forward, backward and step.")
    memory_breakdown: bool = Field(False, description="Report memory around forward and backward.")
    dump_state: bool = Field(False, description="Print the engine's state after it is built.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(None, description="Log level.")
    timers: TimersSection = nested(TimersSection, "Timers.")
    flops_profiler: FlopsProfilerSection = nested(FlopsProfilerSection, "FLOPS of one step.")
    comms_logger: CommsLoggerSection | None = Field(None, description="Log of collectives.")

    # state
    checkpoint: CheckpointSection = nested(CheckpointSection, "Checkpoints.")

    # DeepSpeed's own services and its inference side
    nebula: NebulaSection | None = Field(None, description="Azure's checkpoint service.")
    datastates_ckpt: Any = Field(None, description="The DataStates checkpoint service.")
    autotuning: AutotuningSection | None = Field(None, description="DeepSpeed's autotuner, which replaces the run.")
    eigenvalue: EigenvalueSection | None = Field(None, description="DeepSpeed ignores it here as well.")
    weight_quantization: WeightQuantizationSection | None = Field(None, description="Quantized inference.")
    hybrid_engine: HybridEngineSection | None = Field(None, description="Generation inside training.")

    # this engine's own
    model: ModelSection | None = Field(None, description="What to build.")
    data: DataSection = nested(DataSection, "What to train on.")
    training: TrainingSection = nested(TrainingSection, "How long to train.")
    sequence_keys: list[str] | dict[str, int | list[int]] | None = Field(
        None,
        description="Tensors of a batch that have a sequence dimension, by name or position, with that dimension (a "
        "list alone: dimension 1); null: found from the batch.",
    )
    seed: int = Field(1234, ge=0, description="Seed of everything random.")
    strict: bool = Field(True, description="false: unknown keys are notes, not errors.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train.")

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    def __eq__(self, other: object) -> bool:
        """Equal values; where they came from does not count."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return int(self.hash(), 16)

    @property
    def source(self) -> str | None:
        """The file that was read, or None."""
        return self._provenance.source

    @property
    def raw(self) -> dict[str, Any]:
        """What the user wrote, in today's spelling and with overrides applied: a new copy, JSON-able."""
        return copy.deepcopy(self._provenance.raw)

    @property
    def autos(self) -> frozenset[str]:
        """Paths whose value was "auto" and that nobody supplied; the typed field holds its default."""
        return self._provenance.autos

    @property
    def needs_values(self) -> tuple[str, ...]:
        """Those of `autos` that nothing resolves here; training cannot start without them."""
        from engine.config.auto import needs_values

        return needs_values(self)

    @property
    def notes(self) -> tuple[Note, ...]:
        return self._provenance.notes

    @property
    def not_built(self) -> tuple[str, ...]:
        """Paths of known features that are switched on and that this engine does not have."""
        from engine.config.built import NOT_BUILT

        return tuple(path for path, switched_on in NOT_BUILT.items() if switched_on(self))

    def origin(self, path: str) -> Origin:
        """Whether the value at a JSON path was written by the user, supplied for "auto", or is the default."""
        parts = self._provenance.places.canonical(parse_path(path))
        name = ".".join(str(part) for part in parts)
        if name in self._provenance.supplied:
            return "auto"
        if name in self._provenance.autos:
            return "default"
        return "user" if _contains(self._provenance.raw, parts) else "default"

    def locate(self, path: str) -> tuple[str | None, int | None, int | None]:
        """File, line and column (from 1) of the value at a JSON path, as far as there is such a place."""
        places = self._provenance.places
        return places.of_value(places.canonical(parse_path(path)))

    def spelled(self, path: str) -> str:
        """A path as the user spelled it: ``zero_optimization.stage3_max_live_parameters``, ``bfloat16.enabled``."""
        places = self._provenance.places
        return join_path(places.written(places.canonical(parse_path(path))))

    def resolved(self) -> dict[str, Any]:
        """Every key with its effective value, JSON-able. Reading it again gives an equal config."""
        return self.model_dump(mode="json")

    def hash(self) -> str:
        """12 hex digits of the SHA-256 of the resolved JSON with sorted keys."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _contains(tree: Any, path: Path) -> bool:
    for part in path:
        try:
            tree = step(tree, part)
        except LookupError:
            return False
    return True
