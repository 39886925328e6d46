"""``compression_training``: quantization and pruning while training."""

from typing import ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import Section


class MixedQuantizeSection(Section):
    """From fp16 weights to quantized ones by degrees."""

    ignored_by_deepspeed: ClassVar[bool] = True

    enabled: bool = Field(False, description="Mix both.")
    quantize_change_ratio: float = Field(0.001, ge=0, le=1, description="Growth of the quantized share per step.")


class SharedParametersSection(Section):
    """Settings that all groups of a technique share."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Use the technique.")
    schedule_offset: int | None = Field(None, ge=0, description="First step on which it acts.")
    schedule_offset_end: int | None = Field(None, ge=0, description="Step on which the final sparsity is reached.")
    schedule_offset_stride: int | None = Field(None, ge=1, description="Steps between prunings.")
    quantizer_kernel: bool = Field(False, description="Use a fused kernel.")
    quantize_groups: int = Field(1, ge=1, description="Groups of a weight with scales of their own.")
    quantize_verbose: bool = Field(False, description="Print what is quantized.")
    quantization_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="Range of the integers.")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="How values are rounded.")
    quantize_weight_in_forward: bool = Field(False, description="Keep wide weights and quantize in forward.")
    fp16_mixed_quantize: MixedQuantizeSection | None = Field(None, description="From fp16 by degrees.")
    range_calibration: Literal["dynamic", "static"] = Field("dynamic", description="How ranges are found.")
    method: Literal["l1", "topk", "snip_momentum"] = Field("l1", description="How weights to prune are chosen.")
    block_pattern: str = Field("4x1", description="Shape of a pruned block.")
    dense_ratio: float | None = Field(None, ge=0, le=1, description="Share of weights that is kept.")
    excluded_modules: list[str] = Field([], description="Modules that are left alone.")
    num_heads: int | None = Field(None, ge=1, description="Attention heads per layer.")


class GroupParametersSection(Section):
    """Settings of one group."""

    ignored_by_deepspeed: ClassVar[bool] = True

    start_bits: int | None = Field(None, ge=1, description="Bits of a weight at first.")
    target_bits: int | None = Field(None, ge=1, description="Bits of a weight in the end.")
    quantization_period: int | None = Field(None, ge=0, description="Steps between reductions of the bits.")
    bits: int | None = Field(None, ge=1, description="Bits of an activation.")
    dense_ratio: float | None = Field(None, ge=0, le=1, description="Share of weights that is kept.")
    num_heads: int | None = Field(None, ge=1, description="Attention heads per layer.")


class CompressionGroupSection(Section):
    """Modules that are treated alike."""

    ignored_by_deepspeed: ClassVar[bool] = True

    params: GroupParametersSection | None = Field(None, description="Settings of the group.")
    modules: list[str] | str = Field("*", description="Parts of module names, or * for all.")
    related_modules: list[list[str]] | None = Field(None, description="Modules that are pruned along.")


class TechniqueSection(Section):
    """One way to make a model smaller."""

    ignored_by_deepspeed: ClassVar[bool] = True

    shared_parameters: SharedParametersSection | None = Field(None, description="What all groups share.")
    different_groups: dict[str, CompressionGroupSection] = Field({}, description="Groups by name.")


class LayerReductionSection(Section):
    """A student of fewer layers, started from layers of the teacher."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Remove layers.")
    keep_number_layer: int | None = Field(None, ge=1, description="Layers that are kept.")
    module_name_prefix: str | None = Field(None, description="Name of the list of layers.")
    teacher_layer: list[int] | None = Field(None, description="Numbers of the teacher's layers.")
    other_module_name: list[str] | None = Field(None, description="Other modules that are taken over.")


class CompressionTrainingSection(Section):
    """Quantization and pruning while training; each technique has settings of its own."""

    ignored_by_deepspeed: ClassVar[bool] = True

    weight_quantization: TechniqueSection | None = Field(None, description="Low-bit weights.")
    activation_quantization: TechniqueSection | None = Field(None, description="Low-bit activations.")
    sparse_pruning: TechniqueSection | None = Field(None, description="Single weights are removed.")
    row_pruning: TechniqueSection | None = Field(None, description="Rows are removed.")
    head_pruning: TechniqueSection | None = Field(None, description="Attention heads are removed.")
    channel_pruning: TechniqueSection | None = Field(None, description="Channels are removed.")
    layer_reduction: LayerReductionSection | None = Field(None, description="Layers are removed.")
