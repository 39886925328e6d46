"""Spellings that name the same key: old path -> today's path. What changes a value as well is in dialect.py."""

from __future__ import annotations

Path = tuple[str | int, ...]

_STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
_IGNORED = "a name from DeepSpeed's documentation, which DeepSpeed ignores"

CURRENT: dict[Path, Path] = {
    **{("zero_optimization", f"stage3_{key}"): ("zero_optimization", key) for key in _STAGE3},
    ("tensor_parallel", "autotp_size"): ("tensor_parallel", "size"),
    ("tensor_parallel", "tp"): ("tensor_parallel", "tensor_parallel"),
    ("tensor_parallel", "kernel_inject"): ("tensor_parallel", "replace_with_kernel_inject"),
}
"""Both spellings are documented by DeepSpeed: no note is printed."""

OUTDATED: dict[Path, tuple[Path, str]] = {
    ("bfloat16",): (("bf16",), "the older name of bf16"),
    ("allgather_size",): (("zero_optimization", "allgather_bucket_size"), "deprecated"),
    ("zero_optimization", "stage3_gather_fp16_weights_on_model_save"): (
        ("zero_optimization", "gather_16bit_weights_on_model_save"),
        "deprecated",
    ),
    ("zero_optimization", "cpu_offload_params"): (("zero_optimization", "cpu_offload_param"), "an old spelling"),
    ("zero_optimization", "cpu_offload_pin_memory"): (
        ("zero_optimization", "cpu_offload_use_pin_memory"),
        "an old spelling",
    ),
    ("bf16", "check_overflow"): (("bf16", "check_grad_overflow"), "an older name"),
    ("aio", "thread_count"): (("aio", "intra_op_parallelism"), _IGNORED),
    ("elasticity", "prefer_large_batch"): (("elasticity", "prefer_larger_batch"), _IGNORED),
    ("activation_checkpointing", "partitioned_activations"): (
        ("activation_checkpointing", "partition_activations"),
        _IGNORED,
    ),
}
"""Older or stray spellings, with what the printed note says of them."""

ALIASES: dict[Path, Path] = {**CURRENT, **{old: new for old, (new, _) in OUTDATED.items()}}
