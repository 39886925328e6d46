"""What ``"auto"`` resolves to here.

DeepSpeed itself never resolves it: its callers fill it in beforehand, or the value is dropped without a word. Here a
caller
fills it in through ``auto=`` or ``--set``; some of what is left follows from other keys or has a default that changes
no result;
the rest is listed, all together, as needing a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.config import Config

_DEFAULT = "the default: it changes speed or memory, not results"

RESOLVED_BY_DEFAULT: dict[str, str] = {
    **{
        f"zero_optimization.{key}": _DEFAULT
        for key in (
            "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
            "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size",
            "overlap_comm",
            "contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients",
            "module_granularity_threshold", "gather_16bit_weights_on_model_save",
            "offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu",
            "offload_param.pin_memory",
            "offload_optimizer.buffer_count", "offload_optimizer.pin_memory",
        )
    },
    "steps_per_print": "the default",
    "wall_clock_breakdown": "the default: off",
    "gradient_clipping": "the default: 1.0",
    "communication_data_type": "the default: see the plan",
    "optimizer.params.betas": "the optimizer's own default",
    "optimizer.params.eps": "the optimizer's own default",
    "optimizer.params.weight_decay": "the optimizer's own default",
    "optimizer.params.momentum": "the optimizer's own default",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_type": 'the default: "log"',
    "scheduler.params.last_batch_iteration": "the start of training",
}  # fmt: skip
"""Canonical path -> what stands when nobody supplies a value."""

DERIVED: dict[str, tuple[tuple[str, ...], str]] = {
    "train_batch_size": (
        ("train_micro_batch_size_per_gpu",), "micro-batch x accumulation steps x data-parallel ranks",
    ),
    "train_micro_batch_size_per_gpu": (("train_batch_size",), "batch / accumulation steps / data-parallel ranks"),
    "gradient_accumulation_steps": ((), "batch / micro-batch / data-parallel ranks where both are given, else 1"),
    "scheduler.params.warmup_max_lr": (("optimizer.params.lr",), "the optimizer's lr"),
    "scheduler.params.total_num_steps": (("training.steps",), "training.steps"),
}  # fmt: skip
"""Canonical path -> the keys that must be known for it to follow, and what it follows as."""


def automatic_paths() -> frozenset[str]:
    """Paths for which "auto" is an established value, for the schema and the documentation."""
    callers = {
        "fp16.enabled", "bf16.enabled", "optimizer.params.lr", "scheduler.params.warmup_num_steps",
        "zero_optimization.stage", "zero_optimization.offload_param.device",
        "zero_optimization.offload_optimizer.device",
        "amp.enabled", "amp.opt_level",
    }  # fmt: skip
    return frozenset(callers) | RESOLVED_BY_DEFAULT.keys() | DERIVED.keys()


def needs_values(config: Config) -> tuple[str, ...]:
    """The paths that say "auto", that nobody supplied and that nothing here resolves, sorted.

    What follows from a key that is itself on the list is left out; of keys that follow from each other, all are named.
    """
    needed = set(config.autos) - RESOLVED_BY_DEFAULT.keys()
    listed = needed - DERIVED.keys()
    for path, (sources, _) in DERIVED.items():
        if path in needed and all(source in listed or _known(config, source) for source in sources):
            needed.discard(path)
    return tuple(sorted(needed))


def _known(config: Config, path: str) -> bool:
    return path not in config.autos and config.origin(path) != "default"
