"""``activation_checkpointing``, ``compile``, ``sparse_attention``, ``elasticity``."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.messages import show
from engine.config.sections.base import Fault, Section


class ActivationCheckpointingSection(Section):
    """Recompute activations in backward rather than keep them."""

    ignored_by_deepspeed: ClassVar[bool] = True

    partition_activations: bool = Field(False, description="Spread kept activations over the model-parallel ranks.")
    cpu_checkpointing: bool = Field(False, description="Keep block inputs in CPU memory.")
    contiguous_memory_optimization: bool = Field(False, description="Keep block inputs in one buffer.")
    number_checkpoints: int | None = Field(None, ge=1, description="Number of checkpointed blocks.")
    synchronize_checkpoint_boundary: bool = Field(False, description="Wait for the device at each checkpoint.")
    profile: bool = Field(False, description="Log the time of each checkpoint.")


class CompileSection(Section):
    """DeepCompile: ZeRO as passes of torch.compile."""

    deepcompile: bool = Field(False, description="Use DeepCompile.")
    autoep_non_moe: bool = Field(False, description="Compile what surrounds expert layers, not those themselves.")
    free_activation: bool = Field(False, description="Free activations early.")
    free_activation_threshold: int = Field(10 * 2**20, ge=0, description="Only those above this size, in bytes.")
    offload_activation: bool = Field(False, description="Move activations to the CPU.")
    offload_activation_pin_memory: bool = Field(True, description="Into page-locked memory.")
    offload_opt_states: bool = Field(False, description="Move optimizer state to the CPU.")
    offload_parameters: bool = Field(False, description="Move parameters to the CPU.")
    double_buffer: bool = Field(True, description="Two buffers for reduction.")
    symmetric_memory: bool = Field(False, description="Symmetric memory for collectives.")
    debug_log: bool = Field(False, description="Log what the passes do.")
    sync_before_reduce: bool = Field(False, description="Wait before reducing.")
    sync_after_reduce: bool = Field(False, description="Wait after reducing.")
    sync_before_allgather: bool = Field(False, description="Wait before gathering.")
    sync_after_allgather: bool = Field(False, description="Wait after gathering.")
    keep_int_input_tensors: bool = Field(True, description="Keep integer inputs alive.")
    keep_all_input_tensors: bool = Field(False, description="Keep all inputs alive.")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = Field(None, description="Which passes run.")


class SparseAttentionSection(Section):
    """A block-sparse attention layout."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "mode"
    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "if": {
                "properties": {
                    "mode": {"const": "fixed"},
                    "num_different_global_patterns": {"type": "integer", "minimum": 2},
                },
                "required": ["num_different_global_patterns"],
            },
            "then": {
                "required": ["different_layout_per_head"],
                "properties": {"different_layout_per_head": {"const": True}},
            },
        },
        {
            "if": {
                "properties": {
                    "mode": {"enum": ["fixed", "variable"]},
                    "attention": {"const": "unidirectional"},
                },
                "required": ["attention"],
            },
            "then": {"properties": {"horizontal_global_attention": {"const": False}}},
        },
    )

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = Field(
        "fixed", description="Kind of layout."
    )
    block: int = Field(16, ge=1, description="Side of a block, in tokens.")
    different_layout_per_head: bool = Field(False, description="Heads have layouts of their own.")
    num_local_blocks: int = Field(4, ge=1, description="fixed: blocks in a local window.")
    num_global_blocks: int = Field(1, ge=0, description="fixed, bigbird: blocks that everyone sees.")
    attention: Literal["bidirectional", "unidirectional"] = Field(
        "bidirectional", description="fixed, variable: direction."
    )
    horizontal_global_attention: bool = Field(False, description="Global blocks also see everyone.")
    num_different_global_patterns: int = Field(1, ge=1, description="fixed: patterns that heads take turns with.")
    num_random_blocks: int = Field(0, ge=0, description="variable, bigbird: random blocks per row.")
    local_window_blocks: list[int] = Field([4], description="variable: sizes of the local windows.")
    global_block_indices: list[int] = Field([0], description="variable, bslongformer: global blocks.")
    global_block_end_indices: list[int] | None = Field(None, description="Ends of ranges of global blocks.")
    num_sliding_window_blocks: int = Field(3, ge=1, description="bigbird, bslongformer: width of the sliding window.")

    def faults(self) -> Iterator[Fault]:
        if (
            self.horizontal_global_attention
            and self.attention == "unidirectional"
            and self.mode in ("fixed", "variable")
        ):
            yield Fault(
                "horizontal_global_attention",
                "is true, and attention is unidirectional",
                "false",
                "global blocks can see everyone in bidirectional attention only",
                depends=("attention", "mode"),
            )
        if self.mode == "fixed":
            yield from self._fixed_faults()
        ends = self.global_block_end_indices
        if ends is not None and self.mode in ("variable", "bslongformer"):
            starts = self.global_block_indices
            if len(ends) != len(starts) or any(end <= start for start, end in zip(starts, ends, strict=False)):
                yield Fault(
                    "global_block_end_indices",
                    f"{show(ends)} does not close the ranges that begin at {show(starts)}",
                    "one end above each start",
                    depends=("global_block_indices", "mode"),
                )

    def _fixed_faults(self) -> Iterator[Fault]:
        local, shared, patterns = self.num_local_blocks, self.num_global_blocks, self.num_different_global_patterns
        if shared and local % shared:
            yield Fault(
                "num_global_blocks",
                f"{shared} does not divide num_local_blocks {local}",
                f"a divisor of {local}",
                depends=("num_local_blocks", "mode"),
            )
        elif shared and patterns > local // shared:
            yield Fault(
                "num_different_global_patterns",
                f"{patterns} is more than a window of {local} blocks holds",
                f"at most {local // shared}",
                depends=("num_local_blocks", "num_global_blocks", "mode"),
            )
        if patterns > 1 and not self.different_layout_per_head:
            yield Fault(
                "num_different_global_patterns",
                f"is {patterns}, and all heads have one layout",
                "1",
                "set different_layout_per_head to true",
                depends=("different_layout_per_head", "mode"),
            )


class ElasticitySection(Section):
    """A batch size that many numbers of GPUs can share."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "properties": {
                "version": {"enum": [0.1, 0.2]},
                "micro_batch_sizes": {"minItems": 1, "items": {"minimum": 1}},
            }
        },
    )

    enabled: bool = Field(False, description="Choose batch sizes that suit many world sizes.")
    max_train_batch_size: int = Field(2000, ge=1, description="Samples per step at most.")
    micro_batch_sizes: list[int] = Field([2, 4, 6], description="Micro-batch sizes that fit into memory.")
    min_gpus: int = Field(1, ge=1, description="World sizes from here.")
    max_gpus: int = Field(10_000, ge=1, description="World sizes up to here.")
    min_time: int = Field(0, ge=0, description="Minutes a job should run before it is rescaled.")
    prefer_larger_batch: bool = Field(True, description="Of equals, the larger batch.")
    ignore_non_elastic_batch_info: bool = Field(False, description="Batch keys beside elasticity are overridden.")
    version: float = Field(0.2, description="Algorithm: 0.1 or 0.2.")
    num_gpus_per_node: int = Field(1, ge=1, description="GPUs that come and go together (0.2).")
    model_parallel_size: int = Field(1, ge=1, description="Ranks per model replica (0.2).")

    def faults(self) -> Iterator[Fault]:
        if self.version not in (0.1, 0.2):
            yield Fault("version", f"{self.version} is unknown", "0.1 or 0.2")
        if self.max_gpus < self.min_gpus:
            yield Fault(
                "max_gpus",
                f"{self.max_gpus} is below min_gpus {self.min_gpus}",
                f"at least {self.min_gpus}",
                depends=("min_gpus",),
            )
        if not self.micro_batch_sizes or any(size < 1 for size in self.micro_batch_sizes):
            yield Fault("micro_batch_sizes", "must be a list of sizes", "integers >= 1")
        elif self.enabled and max(self.micro_batch_sizes) > self.max_train_batch_size:
            yield Fault(
                "micro_batch_sizes",
                f"{max(self.micro_batch_sizes)} is above max_train_batch_size",
                f"at most {self.max_train_batch_size}",
                depends=("max_train_batch_size",),
            )
