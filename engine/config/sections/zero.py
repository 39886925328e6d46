"""``zero_optimization`` and ``aio``."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import Fault, Section, when

OffloadDevice = Literal["none", "cpu", "nvme"]
NO_LIMIT = 2**63 - 1


def _nvme_fault(device: str, nvme_path: str | None) -> Iterator[Fault]:
    if device == "nvme" and not nvme_path:
        yield Fault("nvme_path", 'is missing, and device is "nvme"', "a folder on the disk to use", 'set "nvme_path"')


class OffloadParamSection(Section):
    """Where parameters live between uses (stage 3)."""

    shorthand: ClassVar[str] = "device"

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when("device", "nvme", required=["nvme_path"], properties={"nvme_path": {"type": "string", "minLength": 1}}),
    )

    device: OffloadDevice = Field("none", description="Where parameters are kept.")
    nvme_path: str | None = Field(None, description='Folder on a fast disk, for device "nvme".')
    buffer_count: int = Field(5, ge=0, description="Number of swap buffers.")
    buffer_size: int = Field(100_000_000, ge=0, description="Size of a swap buffer, in elements.")
    max_in_cpu: int = Field(1_000_000_000, ge=0, description="Elements kept in CPU memory when offloading to disk.")
    pin_memory: bool = Field(True, description="Page-locked CPU memory: faster copies.")

    def faults(self) -> Iterator[Fault]:
        yield from _nvme_fault(self.device, self.nvme_path)


class OffloadOptimizerSection(Section):
    """Where masters and optimizer state live, and where the update runs."""

    shorthand: ClassVar[str] = "device"

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when("device", "nvme", required=["nvme_path"], properties={"nvme_path": {"type": "string", "minLength": 1}}),
    )

    device: OffloadDevice = Field("none", description="Where masters and moments are kept.")
    nvme_path: str | None = Field(None, description='Folder on a fast disk, for device "nvme".')
    buffer_count: int = Field(4, ge=0, description="Number of swap buffers.")
    pin_memory: bool = Field(True, description="Page-locked CPU memory: faster copies.")
    pipeline_read: bool = Field(False, description="Read the next tile while the current one is updated.")
    pipeline_write: bool = Field(False, description="Write the previous tile while the current one is updated.")
    fast_init: bool = Field(False, description="Faster initialisation when offloading to disk.")
    ratio: float = Field(1.0, ge=0, le=1, description="Share of the parameters that is updated on the CPU (stage 3).")
    super_offload: bool = Field(False, description="DeepSpeed's Superchip variant of offloading.")
    cpuadam_cores_perc: float = Field(0.8, ge=0, le=1, description="Share of CPU cores for the update (super_offload).")

    def faults(self) -> Iterator[Fault]:
        yield from _nvme_fault(self.device, self.nvme_path)


class ZenFlowSection(Section):
    """DeepSpeed's ZenFlow: important gradients are applied at once, the rest later on the CPU."""

    topk_ratio: float = Field(0.1, ge=0, le=1, description="Share of gradients that is applied at once.")
    select_strategy: Literal["auto", "step", "epoch"] = Field("auto", description="When the choice is renewed.")
    select_interval: int | Literal["auto"] = Field("auto", description="How often the choice is renewed.")
    update_interval: int | Literal["auto"] = Field("auto", description="Steps between updates of the rest.")
    overlap_step: bool = Field(False, description="Overlap the CPU update with the next steps.")
    offload: bool = Field(False, description="Keep selected optimizer state on the CPU.")
    auto_ratio: float = Field(0.99, ge=0, le=1, description="Threshold of the automatic update interval.")
    full_warm_up_rounds: int = Field(0, ge=0, description="Steps that update everything first.")
    pt_reserved_cores_perc: float = Field(0.5, ge=0, le=1, description="Share of CPU cores left to PyTorch.")
    steps_per_epoch: int | None = Field(None, ge=1, description="Filled in by DeepSpeed itself.")


class LocoSection(Section):
    """LoCo: the error of quantized gradients is fed back into the next ones."""

    ignored_by_deepspeed: ClassVar[bool] = True

    err_beta: float = Field(0.8, ge=0, le=1, description="Weight of the older errors.")
    reset_T: int = Field(1024, ge=1, description="Steps after which the errors are forgotten.")


class LeafModuleSection(Section):
    """Modules that stage 3 gathers as a whole."""

    classes: list[str] | None = Field(None, description="Class paths; null: DeepSpeed's list of MoE blocks.")
    names: list[str] = Field([], description="Module names.")
    name_suffixes: list[str] = Field([], description="Endings of module names.")


class ZeroSection(Section):
    """Sharding of optimizer state (1), gradients (2) and parameters (3) over the data-parallel ranks."""

    shorthand: ClassVar[str] = "stage"
    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "properties": {
                "mics_shard_size": {"minimum": -1, "not": {"const": 0}},
            }
        },
        {
            "if": {"properties": {"stage": {"enum": [0, 1, 2]}}},
            "then": {"properties": {"offload_optimizer": {"properties": {"ratio": {"minimum": 1}}}}},
        },
        {
            "if": {"properties": {"stage": {"enum": [0, 3]}}},
            "then": {"properties": {"compute_grad_norm": {"const": True}}},
        },
    )

    stage: int = Field(
        0, ge=0, le=3, description="0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too."
    )
    contiguous_gradients: bool = Field(True, description="Copy gradients into one buffer as they appear.")
    reduce_scatter: bool = Field(True, description="Reduce gradients to their owner rather than to everyone.")
    reduce_bucket_size: int = Field(500_000_000, ge=0, description="Gradients reduced at once, in elements.")
    use_multi_rank_bucket_allreduce: bool = Field(True, description="Merge the buckets of several owners.")
    allgather_partitions: bool = Field(True, description="Accepted; DeepSpeed no longer reads it either.")
    allgather_bucket_size: int = Field(500_000_000, ge=0, description="Parameters gathered at once, in elements.")
    overlap_comm: bool | None = Field(None, description="Overlap reduction with backward; null: only at stage 3.")
    load_from_fp32_weights: bool = Field(True, description="Restore masters from fp32 rather than from 16-bit weights.")
    elastic_checkpoint: bool = Field(False, description="Old switch; every checkpoint here loads at any world size.")
    offload_param: OffloadParamSection | None = Field(None, description="Parameters on CPU or disk (stage 3).")
    offload_optimizer: OffloadOptimizerSection | None = Field(None, description="Optimizer state on CPU or disk.")
    zenflow: ZenFlowSection | None = Field(None, description="ZenFlow, with the optimizer offloaded.")
    sub_group_size: int = Field(1_000_000_000, ge=0, description="Elements that the optimizer updates at once.")
    prefetch_bucket_size: int = Field(50_000_000, ge=0, description="Parameters fetched ahead, in elements (stage 3).")
    param_persistence_threshold: int = Field(
        100_000, ge=0, description="Parameters with fewer elements stay whole on every rank (stage 3)."
    )
    model_persistence_threshold: int = Field(
        NO_LIMIT, ge=0, description="Cap on all elements that stay whole (stage 3)."
    )
    max_live_parameters: int = Field(1_000_000_000, ge=0, description="Elements gathered at any time (stage 3).")
    max_reuse_distance: int = Field(
        1_000_000_000, ge=0, description="Keep a parameter that is used again within this many elements (stage 3)."
    )
    gather_16bit_weights_on_model_save: bool = Field(False, description="Allow save_16bit_model at stage 3.")
    module_granularity_threshold: int = Field(0, ge=0, description="Fetch modules below this size as a unit (stage 3).")
    use_all_reduce_for_fetch_params: bool = Field(False, description="Gather with an all-reduce (stage 3).")
    allgather_sequential: bool = Field(False, description="One parameter per gather (stage 3).")
    ignore_unused_parameters: bool = Field(True, description="false: a parameter without a gradient is an error.")
    round_robin_gradients: bool = Field(False, description="Spread gradient copies to the CPU over the ranks.")
    zero_hpz_partition_size: int = Field(
        1, ge=0, description="ZeRO++: ranks that share a second copy of the shards (stage 3)."
    )
    zero_quantized_weights: bool = Field(False, description="ZeRO++: gather parameters as int8 (stage 3).")
    zero_quantized_nontrainable_weights: bool = Field(False, description="ZeRO++: the same for frozen parameters.")
    zero_quantized_gradients: bool = Field(False, description="ZeRO++: reduce gradients in low precision (stage 3).")
    zeropp_loco_param: LocoSection | None = Field(None, description="LoCo error feedback of quantized gradients.")
    mics_shard_size: int = Field(
        -1, description="MiCS: ranks that shard together, replicated beyond (stage 3); -1: off."
    )
    mics_hierarchical_params_gather: bool = Field(False, description="MiCS: gather within nodes first.")
    memory_efficient_linear: bool = Field(True, description="DeepSpeed's own linear layer under zero.Init.")
    pipeline_loading_checkpoint: bool = Field(False, description="Ranks load a checkpoint one after another.")
    override_module_apply: bool = Field(True, description="Gather parameters for Module.apply under zero.Init.")
    log_trace_cache_warnings: bool = Field(False, description="Warn when the order of modules changes (stage 3).")
    enable_sanity_checks: bool = Field(False, description="Extra internal checks (stage 3).")
    compute_grad_norm: bool = Field(True, description="false: the gradient norm is not computed (stages 1 and 2).")
    parameter_alignment: bool = Field(False, description="Every parameter starts at a multiple of 16 bytes.")
    save_muon_momentum_buffer_in_memory: bool = Field(False, description="Keep Muon's momentum in memory, not on disk.")
    leaf_module: LeafModuleSection | None = Field(None, description="Modules that are gathered as a whole.")

    def faults(self) -> Iterator[Fault]:
        if self.mics_shard_size == 0 or self.mics_shard_size < -1:
            yield Fault("mics_shard_size", f"is {self.mics_shard_size}", "-1 (off) or an integer >= 1", code="value")
        offload = self.offload_optimizer
        if offload is not None and offload.ratio < 1 and self.stage != 3:
            yield Fault(
                "offload_optimizer.ratio",
                f"is {offload.ratio:g}, and part of an update is offloaded at stage 3 only; stage is {self.stage}",
                "1 below stage 3",
                "set stage to 3 or remove ratio",
                depends=("stage",),
            )
        if not self.compute_grad_norm and self.stage not in (1, 2):
            yield Fault(
                "compute_grad_norm",
                f"is false, which needs stage 1 or 2, and stage is {self.stage}",
                "true",
                "remove the key",
                depends=("stage",),
            )


class AioSection(Section):
    """Disk access for offloading to NVMe."""

    ignored_by_deepspeed: ClassVar[bool] = True

    block_size: int = Field(1_048_576, ge=1, description="Bytes per request.")
    queue_depth: int = Field(8, ge=1, description="Requests in flight.")
    intra_op_parallelism: int = Field(1, ge=1, description="Threads per request.")
    single_submit: bool = Field(False, description="Submit requests one by one.")
    overlap_events: bool = Field(True, description="Submit while waiting for completions.")
    use_gds: bool = Field(False, description="GPUDirect Storage.")
