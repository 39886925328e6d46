"""``tensor_parallel``, ``expert_parallel``, ``pipeline``."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.messages import show
from engine.config.sections.base import Fault, Section, nested, when


def _pattern_faults(key: str, pattern: str) -> Iterator[Fault]:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield Fault(key, f"{show(pattern)} is no regular expression: {error}", "what Python's re takes")


SplitName = Literal["column", "row", "vocabulary", "sequence", "replicate"]
"""Along outputs, along inputs, along the rows of an embedding, along the sequence, or not at all."""


class TensorParallelGroupSection(Section):
    """The inner ``tensor_parallel`` object."""

    tp_size: int = Field(1, ge=1, description="1, or equal to size.")
    tp_grain_size: int = Field(1, ge=1, description="Shard sizes are multiples of this.")


class LayerSpecSection(Section):
    """How the layers that match a pattern are split."""

    ignored_by_deepspeed: ClassVar[bool] = True

    patterns: list[str] = Field([], description="Regular expressions of parameter names.")
    partition_type: Literal["column", "row", "skip"] = Field(
        "column", description="Along outputs, inputs, or not at all."
    )
    shape: list[Any] | None = Field(None, description="Logical shape of a fused weight.")
    partition_dim: int | None = Field(None, description="Dimension that is split; null: 0 for column, 1 for row.")
    model_types: list[str] | None = Field(None, description="Only for models of these types.")
    gather_output: bool = Field(False, description="Gather the outputs.")
    grad_allreduce: bool = Field(False, description="All-reduce the gradients.")

    def faults(self) -> Iterator[Fault]:
        for index, pattern in enumerate(self.patterns):
            for fault in _pattern_faults("patterns", pattern):
                yield fault._replace(message=f"entry {index}: {fault.message}")


class PartitionConfigSection(Section):
    """Which layers are split, and how."""

    ignored_by_deepspeed: ClassVar[bool] = True

    tp_size: int = Field(1, ge=1, description="Overwritten by size.")
    use_default_specs: bool = Field(True, description="Add the specs known for the model's type.")
    strict_mode: bool = Field(False, description="A parameter that no pattern matches is an error.")
    embedding_partition_dim: int = Field(1, ge=0, le=1, description="Dimension along which embeddings are split.")
    lm_head_patterns: list[str] = Field(["lm_head", "embed_out"], description="Names of the output projection.")
    layer_specs: list[LayerSpecSection] = Field([], description="One object per kind of layer; the first match counts.")


class TensorParallelSection(Section):
    """Splitting single layers over ranks. ``size`` is DeepSpeed's ``autotp_size``; a number alone is the size."""

    shorthand: ClassVar[str] = "size"

    size: int = Field(0, ge=0, description="Ranks that share each layer; 0 and 1: off.")
    plan: dict[str, SplitName] = Field(
        {}, description='How layers are split, by pattern of their names: {"*.q_proj": "column"}; {}: found.'
    )
    preset_model: str | None = Field(None, description="Use the layer specs known for this type of model.")
    partition_config: PartitionConfigSection | None = Field(None, description="Which layers are split, and how.")
    tp_overlap_comm: bool = Field(False, description="Overlap communication with backward.")
    dtype: str | None = Field(None, description="DeepSpeed cannot read this key from JSON; the model's dtype counts.")
    vocab_parallel_lm_head: bool | None = Field(None, description="Split the output projection; null: as tied.")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = Field("torch", description="Who computes the split loss.")
    tensor_parallel: TensorParallelGroupSection = nested(TensorParallelGroupSection, "DeepSpeed's inner object.")
    injection_policy_tuple: list[Any] | None = Field(None, description="Old injection policy; inference only.")
    keep_module_on_host: bool = Field(False, description="Inference only.")
    replace_with_kernel_inject: bool = Field(False, description="Inference only.")

    def faults(self) -> Iterator[Fault]:
        inner = self.tensor_parallel.tp_size
        if inner not in (1, max(self.size, 1)):
            yield Fault(
                "tensor_parallel.tp_size",
                f"is {inner}, and size is {self.size}",
                f"1 or {self.size}" if self.size > 1 else "1",
                f"set size to {inner}, and leave tp_size out",
                depends=("size",),
            )


class PipelineSection(Section):
    """Splitting the model's depth over ranks. In DeepSpeed stages and partition are set in code; here they count."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "stages"
    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "properties": {
                "partition": {
                    "pattern": "^(best|uniform|parameters|time|type:.+)$",
                    "minItems": 1,
                    "items": {"minimum": 1},
                }
            }
        },
    )

    stages: int | Literal["auto"] = Field("auto", description='Pipeline stages; "auto" and 1: off.')
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"] = Field(
        "1f1b", description="The order of forwards and backwards."
    )
    partition: str | list[int] = Field(
        "best",
        description='How layers are dealt out: "parameters" (and "best"), "time" (measured), "uniform", "type:REGEX", '
        "or the number of layers of each stage.",
    )
    micro_batches: int | None = Field(
        None, ge=1, description="Micro-batches of a window on a rank; null: gradient_accumulation_steps."
    )
    virtual_stages: int | None = Field(
        None, ge=1, description="Parts of the model on one rank; null: what the schedule needs."
    )
    seed_layers: bool = Field(False, description="Seed each layer by its number when it is built.")
    activation_checkpoint_interval: int = Field(0, ge=0, description="Layers per checkpoint; 0: none.")
    use_reentrant: bool | None = Field(None, description="Which variant of torch's checkpoint function.")
    pipe_partitioned: bool = Field(True, description="Send activations in shards under tensor parallelism.")
    grad_partitioned: bool = Field(True, description="Send gradients in shards under tensor parallelism.")

    def faults(self) -> Iterator[Fault]:
        allowed = '"uniform", "parameters", "best", "time", "type:REGEX" or a list of counts'
        if not isinstance(self.partition, str):
            if not self.partition or min(self.partition) < 1:
                yield Fault("partition", f"{self.partition} leaves a stage without layers", "counts of at least 1")
            return
        method, _, pattern = self.partition.partition(":")
        if method == "type" and pattern:
            yield from _pattern_faults("partition", pattern)
        elif self.partition not in ("uniform", "parameters", "best", "time"):
            yield Fault("partition", f"{show(self.partition)} is unknown", allowed)


class ExpertParallelSection(Section):
    """Spreading the experts of a mixture over ranks."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"
    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when("enabled", True, properties={"load_balance_coeff": {"type": "null"}}),
    )

    enabled: bool = Field(False, description="Find the model's expert layers and spread them.")
    autoep_size: int = Field(1, ge=1, description="Ranks that share the experts.")
    expert_tensor_parallel_size: int = Field(1, ge=1, le=1, description="Only 1 exists.")
    validate_folding_routing: bool = Field(False, description="Check that ranks which share a batch route alike.")
    preset_model: str | None = Field(None, description="mixtral, qwen3_moe, qwen3_5_moe, deepseek_v2, deepseek_v3.")
    moe_layer_pattern: str | None = Field(None, description="Regular expression of expert layers' names.")
    router_pattern: str | None = Field(None, description="Name of the router within a layer.")
    expert_pattern: str | None = Field(None, description="Name of the experts within a layer.")
    shared_experts_pattern: str | None = Field(None, description="Name of the shared experts.")
    shared_experts_gate_pattern: str | None = Field(None, description="Name of the shared experts' gate.")
    use_grouped_mm: bool = Field(True, description="Grouped matrix products.")
    disable_triton_grouped_mm: bool = Field(False, description="Do without the Triton kernel.")
    route_norm: bool | None = Field(None, description="Normalise the chosen scores.")
    route_scale: float = Field(1.0, description="Factor on the chosen scores.")
    routed_scaling_factor: float | Literal["auto"] = Field("auto", description="Factor on the routed output.")
    score_apply: Literal["auto", "pre", "post"] = Field("auto", description="Scores multiply inputs or outputs.")
    score_func: Literal["auto", "softmax", "sigmoid"] = Field("auto", description="How scores are made.")
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = Field("auto", description="How outputs are summed.")
    top_k: int | Literal["auto"] = Field("auto", description="Experts per token.")
    num_expert_groups: int | None = Field(None, ge=1, description="Groups of experts.")
    num_limited_groups: int | None = Field(None, ge=1, description="Groups that a token may use.")
    load_balance_coeff: float | None = Field(None, description="Must be null in DeepSpeed.")
    expert_w1: str | None = Field(None, description="Name of the gate projection.")
    expert_w2: str | None = Field(None, description="Name of the down projection.")
    expert_w3: str | None = Field(None, description="Name of the up projection; null: fused with w1.")
    num_experts_attr: str | None = Field(None, description="Config attribute that holds the number of experts.")
    top_k_attr: str | None = Field(None, description="Config attribute that holds experts per token.")
    has_shared_experts: bool | None = Field(None, description="Whether there are shared experts.")

    def faults(self) -> Iterator[Fault]:
        if self.enabled and self.load_balance_coeff is not None:
            yield Fault("load_balance_coeff", f"is {self.load_balance_coeff}", "null", "DeepSpeed refuses any value")
        if self.moe_layer_pattern is not None:
            yield from _pattern_faults("moe_layer_pattern", self.moe_layer_pattern)
