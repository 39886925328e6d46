"""What a key is about, and which defaults a reader should see."""

from __future__ import annotations

SUBJECTS: dict[str, str] = {
    "batch": "Batch and length",
    "precision": "Precision",
    "zero": "ZeRO and communication",
    "parallel": "Parallelism",
    "optimizer": "Optimizer",
    "schedule": "Learning rate",
    "data": "Model and data",
    "efficiency": "Curricula, layers, attention",
    "checkpoints": "Checkpoints",
    "monitors": "Monitors and logs",
    "run": "The run",
    "services": "DeepSpeed's services",
}
"""The subjects, in the order in which they are explained, with their headings."""

TOP_LEVEL: dict[str, str] = {
    **dict.fromkeys(
        (
            "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
            "managed_gradient_accumulation", "dataloader_drop_last", "training",
        ),
        "batch",
    ),
    **dict.fromkeys(("fp16", "bf16", "torch_autocast", "amp", "data_types", "graph_harvesting"), "precision"),
    **dict.fromkeys(
        (
            "zero_optimization", "aio", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
            "gradient_allreduce_op", "sparse_gradients", "disable_allgather", "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        ),
        "zero",
    ),
    **dict.fromkeys(
        (
            "pipeline", "tensor_parallel", "sequence_parallel_size", "seq_parallel_communication_data_type",
            "data_parallel_size", "expert_parallel", "use_data_before_expert_parallelism", "parallel", "elasticity",
            "smp",
        ),
        "parallel",
    ),
    **dict.fromkeys(("optimizer", "gradient_clipping"), "optimizer"),
    "scheduler": "schedule",
    **dict.fromkeys(("model", "data", "vocabulary_size"), "data"),
    **dict.fromkeys(
        (
            "activation_checkpointing", "curriculum_learning", "data_efficiency", "progressive_layer_drop",
            "sequence_keys", "sparse_attention", "compression_training", "compile",
        ),
        "efficiency",
    ),
    "checkpoint": "checkpoints",
    **dict.fromkeys(
        (
            "tensorboard", "wandb", "csv_monitor", "comet", "steps_per_print", "wall_clock_breakdown",
            "memory_breakdown", "dump_state", "log_level", "timers", "flops_profiler", "comms_logger",
        ),
        "monitors",
    ),
    **dict.fromkeys(("seed", "strict", "device"), "run"),
    **dict.fromkeys(
        ("nebula", "datastates_ckpt", "autotuning", "eigenvalue", "weight_quantization", "hybrid_engine"), "services",
    ),
}  # fmt: skip
"""Top-level key -> subject."""

ELSEWHERE: dict[str, str] = {
    "training.save_interval": "checkpoints",
    "training.eval_interval": "data",
    "training.eval_batches": "data",
    "training.sample_length": "data",
}
"""Keys whose subject is not that of their section."""

DEFAULTS_THAT_MATTER = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "data_types.param_dtype", "data_types.grad_accum_dtype", "fp16.loss_scale",
        "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "zero_optimization.prefetch_bucket_size",
        "communication_data_type",
        "optimizer.type", "optimizer.params.lr", "optimizer.params.weight_decay", "gradient_clipping",
        "scheduler.type",
        "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_type", "scheduler.params.cos_min_ratio",
        "data.path", "data.sequence_length", "training.save_interval", "training.eval_interval",
        "steps_per_print", "seed",
    }
)  # fmt: skip
"""Keys that are explained even where nobody wrote them, because people are surprised by what they default to."""


OF_16_BITS = frozenset({"data_types.grad_accum_dtype", "communication_data_type"})
"""Those whose default is what anybody expects where a model computes in fp32."""


def subject_of(path: str) -> str:
    """The subject of a key, "run" for a key that is in no table."""
    return ELSEWHERE.get(path) or TOP_LEVEL.get(path.partition(".")[0], "run")
