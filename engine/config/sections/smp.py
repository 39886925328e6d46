"""``smp``: the parameters of SageMaker's model parallel library, versions 1 and 2.

What has a counterpart is moved to it before the config is typed (engine/config/smp.py), so those fields stay null.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import Fault, Section

PlacementStrategy = Literal["cluster", "spread", "PDT", "PTD", "DPT", "DTP", "TPD", "TDP"]


class SmpSection(Section):
    """SageMaker's model parallel parameters, read as the keys of this file that mean the same."""

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        {"not": {"properties": {"auto_partition": {"const": False}}, "required": ["auto_partition"]}},
    )

    # both versions
    tensor_parallel_degree: int | None = Field(None, ge=1, description="SMP's name of tensor_parallel.size.")
    activation_loading_horizon: int | None = Field(None, ge=1, description="When offloaded activations come back.")

    # version 1
    pipeline_parallel_degree: int | None = Field(None, ge=1, description="SMP's name of pipeline.stages.")
    partitions: int | None = Field(None, ge=1, description="The older name of pipeline_parallel_degree.")
    microbatches: int | None = Field(None, ge=1, description="SMP's name of gradient_accumulation_steps.")
    pipeline: Literal["interleaved", "simple"] | None = Field(None, description="Order of micro-batches.")
    optimize: Literal["memory", "speed"] | None = Field(None, description="How SMP's own layers communicate.")
    placement_strategy: PlacementStrategy | None = Field(
        None, description="parallel.placement: cluster is DPT, spread is TPD."
    )
    auto_partition: bool | None = Field(None, description="Must not be false: the cut is pipeline.partition.")
    default_partition: int | None = Field(None, ge=0, description="Only counts without auto_partition.")
    contiguous: bool | None = Field(None, description="TensorFlow only.")
    horovod: bool | None = Field(None, description="TensorFlow only; true is refused.")
    memory_weight: float | None = Field(None, ge=0, le=1, description="Memory against time in the automatic cut.")
    ddp: bool | None = Field(None, description="Gradients are always averaged over data-parallel ranks.")
    active_microbatches: int | None = Field(None, ge=1, description="Most micro-batches in flight.")
    deterministic_server: bool | None = Field(None, description="Order of requests between ranks.")
    offload_activations: bool | None = Field(
        None, description="SMP's name of activation_checkpointing.cpu_checkpointing."
    )
    fp16: bool | None = Field(None, description="SMP's name of fp16.enabled.")
    fp16_params: bool | None = Field(None, description="SMP's name of fp16.enabled.")
    bf16: bool | None = Field(None, description="SMP's name of bf16.enabled.")
    shard_optimizer_state: bool | None = Field(None, description="SMP's name of zero_optimization.stage 1.")
    prescaled_batch: bool | None = Field(None, description="Tensor-parallel ranks get the same samples: always so.")
    skip_tracing: bool | None = Field(None, description="SMP traces the model; this engine does not.")
    sharded_data_parallel_degree: int | None = Field(
        None, ge=1, description="SMP's name of zero_optimization.stage 3 with mics_shard_size."
    )
    sdp_reduce_bucket_size: int | None = Field(
        None, ge=1, description="SMP's name of zero_optimization.reduce_bucket_size."
    )
    sdp_param_persistence_threshold: int | None = Field(
        None, ge=0, description="SMP's name of zero_optimization.param_persistence_threshold."
    )
    sdp_max_live_parameters: int | None = Field(
        None, ge=1, description="SMP's name of zero_optimization.max_live_parameters."
    )
    sdp_hierarchical_allgather: bool | None = Field(
        None, description="SMP's name of zero_optimization.mics_hierarchical_params_gather."
    )
    sdp_gradient_clipping: float | None = Field(None, ge=0, description="SMP's name of gradient_clipping.")
    ddp_dist_backend: Literal["auto", "nccl"] | None = Field(None, description="The device decides.")
    delayed_parameter_initialization: bool | None = Field(None, description="Models on meta are filled after the cut.")
    static_mode: bool | None = Field(None, description="A switch of SMP's pipeline.")
    fast_mode: bool | None = Field(None, description="A switch of SMP's pipeline.")

    # version 2
    hybrid_shard_degree: int | None = Field(
        None, ge=0, description="SMP's name of zero_optimization.stage 3 with mics_shard_size; 1: stage 0."
    )
    sm_activation_offloading: bool | None = Field(
        None, description="SMP's name of activation_checkpointing.cpu_checkpointing."
    )
    fsdp_cache_flush_warnings: bool | None = Field(None, description="A warning of SMP's.")
    allow_empty_shards: bool | None = Field(None, description="Ranks may always hold nothing.")
    context_parallel_degree: int | None = Field(None, ge=1, description="SMP's name of parallel.context_parallel.")
    expert_parallel_degree: int | None = Field(None, ge=1, description="SMP's name of expert_parallel.autoep_size.")
    random_seed: int | None = Field(None, ge=0, description="SMP's name of seed.")

    def faults(self) -> Iterator[Fault]:
        if self.auto_partition is False:
            yield Fault(
                "auto_partition",
                "is false: modules are not given to stages by smp.partition contexts here",
                "true",
                "cut the model with pipeline.partition",
            )
