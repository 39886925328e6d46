"""Settings of DeepSpeed's that cannot take effect here, each with the reason: one printed note, only when set.

Keys that mean nothing for any run are remarked on by the config (engine/config/remarks.py); whether those here mean
something depends on the stage or on the value. A key is silent where the value that the user gave is what the engine
does anyway (``honoured``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings


@dataclass(frozen=True)
class Ineffective:
    """``path`` has no effect because of ``reason``, unless its value is among ``honoured``."""

    path: str
    reason: str
    honoured: tuple[Any, ...] = ()


ZERO = "zero_optimization."

STAGE_3_KEYS = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "sub_group_size",
    "mics_hierarchical_params_gather",
    "leaf_module",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "offload_param",
)
"""Keys of ``zero_optimization`` that are about sharded parameters."""

INEFFECTIVE = (
    Ineffective(
        "tensor_parallel.preset_model", "a model's own plan is read, else the flow of data through its blocks", (None,)
    ),
    Ineffective("tensor_parallel.partition_config.use_default_specs", "what no spec names stays whole", (False,)),
    Ineffective("tensor_parallel.partition_config.embedding_partition_dim", "embeddings are cut by their rows", (0,)),
    Ineffective(
        "tensor_parallel.partition_config.lm_head_patterns", "the output layer is known by its size and its weight"
    ),
    Ineffective("tensor_parallel.tp_overlap_comm", "a row's sum is needed by the layer that follows it", (False,)),
    Ineffective("tensor_parallel.tensor_parallel.tp_grain_size", "every rank gets equal parts", (1,)),
    Ineffective("tensor_parallel.injection_policy_tuple", "it is for inference", (None,)),
    Ineffective("tensor_parallel.keep_module_on_host", "it is for inference", (False,)),
    Ineffective("tensor_parallel.replace_with_kernel_inject", "it is for inference", (False,)),
    Ineffective("tensor_parallel.vocab_parallel_ce_backend", "the engine computes the loss of cut logits", ("torch",)),
    Ineffective(
        "torch_autocast.lower_precision_safe_modules",
        "gradients of all modules are reduced in communication_data_type, and autocast decides by operation",
        (None,),
    ),
    Ineffective(ZERO + "contiguous_gradients", "gradients always lie in contiguous buckets", (True,)),
    Ineffective(ZERO + "reduce_scatter", "from stage 1 on each gradient goes to its owner only", (True,)),
    Ineffective(ZERO + "overlap_comm", "communication always overlaps where the boundary is known", (True, None)),
    Ineffective(ZERO + "allgather_bucket_size", "parameters are gathered in the units in which gradients are reduced"),
    Ineffective(ZERO + "use_multi_rank_bucket_allreduce", "a bucket always serves all its owners at once", (True,)),
    Ineffective(ZERO + "round_robin_gradients", "every rank owns an equal share of every bucket", (False,)),
    Ineffective(ZERO + "load_from_fp32_weights", "masters are always restored from fp32", (True,)),
    Ineffective(ZERO + "elastic_checkpoint", "every checkpoint loads under any world size", (True,)),
    Ineffective(ZERO + "ignore_unused_parameters", "a parameter without a gradient is never an error", (True,)),
    Ineffective(ZERO + "param_persistence_threshold", "a small parameter is gathered together with its block"),
    Ineffective(ZERO + "model_persistence_threshold", "no parameter outside a gathered block stays whole"),
    Ineffective(ZERO + "max_live_parameters", "a group of blocks is freed as soon as it was used"),
    Ineffective(ZERO + "max_reuse_distance", "a group of blocks is freed as soon as it was used"),
    Ineffective(ZERO + "sub_group_size", "the optimizer updates its whole local shard at once"),
    Ineffective(ZERO + "module_granularity_threshold", "parameters are gathered by block"),
    Ineffective(ZERO + "leaf_module", "every block is gathered as a whole"),
    Ineffective(ZERO + "use_all_reduce_for_fetch_params", "parameters are gathered with an all-gather", (False,)),
    Ineffective(ZERO + "allgather_sequential", "a block's parameters are gathered in one collective", (False,)),
    Ineffective(ZERO + "gather_16bit_weights_on_model_save", "any checkpoint can be exported whole", (True, False)),
    Ineffective(ZERO + "mics_hierarchical_params_gather", "gathers stay within the shard group", (False,)),
    Ineffective(ZERO + "memory_efficient_linear", "torch's own linear layer is used", (False,)),
    Ineffective(ZERO + "pipeline_loading_checkpoint", "a rank reads only its own part of a checkpoint", (False,)),
    Ineffective(ZERO + "override_module_apply", "models are initialised before they are sharded", (True,)),
    Ineffective(ZERO + "log_trace_cache_warnings", "there is no trace of modules to go stale", (False,)),
    Ineffective(ZERO + "enable_sanity_checks", "there is no switch for internal checks", (False,)),
    Ineffective(ZERO + "allgather_partitions", "parameters are always gathered; DeepSpeed does not read it", (True,)),
    Ineffective(ZERO + "compute_grad_norm", "the norm is always computed and reported", (True,)),
    Ineffective(ZERO + "parameter_alignment", "parameters lie in their buckets without padding", (False,)),
    Ineffective(ZERO + "save_muon_momentum_buffer_in_memory", "momentum is always in memory", (True,)),
    Ineffective("bf16.immediate_grad_update", "gradients accumulate as each one is ready", (True,)),
    Ineffective("fp16.auto_cast", "floating inputs are always cast to the compute dtype", (True,)),
    Ineffective(
        "seq_parallel_communication_data_type",
        "gradients of slices are reduced with all others, in communication_data_type",
    ),
)


def note_ineffective(config: Config, findings: Findings) -> None:
    """One note per key that the user set and that changes nothing."""
    stage = config.zero_optimization.stage
    if findings.is_auto(ZERO + "stage"):
        stage = 3  # what may still act is not said to be without effect
    beyond_stage = _beyond(stage)
    for path in sorted(beyond_stage):
        if findings.is_given(path) and not _switched_off(config, path):
            findings.note(path, f"no effect at stage {stage}: {ACTS_AT_STAGE_3 if stage < 3 else _BUCKETS}")
    for entry in INEFFECTIVE:
        if entry.path in beyond_stage or not findings.is_given(entry.path):
            continue
        if _in_dead_section(config, entry.path) or value_at(config, entry.path) in entry.honoured:
            continue
        findings.note(entry.path, f"no effect: {entry.reason}")


def at_this_stage(path: str, stage: int) -> str | None:
    """Why a key of ``zero_optimization`` has no effect at a stage, None where it may have one."""
    if path not in _beyond(stage):
        return None
    return f"{ACTS_AT_STAGE_3}, and the stage is {stage}" if stage < 3 else f"at stage 3 {_BUCKETS}"


def _beyond(stage: int) -> set[str]:
    return {ZERO + key for key in STAGE_3_KEYS} if stage < 3 else {ZERO + "reduce_bucket_size"}


ACTS_AT_STAGE_3 = "it acts at stage 3 only"
_BUCKETS = "a group of blocks is reduced together (stage3_prefetch_bucket_size)"


def value_at(config: Config, path: str) -> Any:
    """The typed value at a dotted path of canonical keys; it may lead into free objects."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key)
    return value


def _switched_off(config: Config, path: str) -> bool:
    value = value_at(config, path)
    return value is False or value is None or getattr(value, "device", None) == "none"


def _in_dead_section(config: Config, path: str) -> bool:
    """A section that is switched off is silent."""
    section = path.split(".")[0]
    return section in ("fp16", "bf16") and section in path.split(".")[:-1] and not value_at(config, section).enabled
