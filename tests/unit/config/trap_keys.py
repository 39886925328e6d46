"""Traps 1 to 11 and 48 to 71: keys that vanish, combinations, "auto"."""

from __future__ import annotations

from tests.unit.config.trap_case import (
    INVALID,
    LACKS,
    LTD_SCHEDULE,
    NEEDS,
    VALID,
    Case,
    adam,
    zero,
)

KEYS: dict[int, list[Case]] = {
    1: [Case({"zero_optimisation": {"stage": 3}}, INVALID, "zero_optimisation", "did you mean zero_optimization?")],
    2: [Case({"tensorbord": {"enabled": True}}, INVALID, "tensorbord", "did you mean tensorboard?")],
    3: [
        Case(
            {"activation_checkpointing": {"partitioned_activations": True}},
            LACKS,
            "activation_checkpointing.partitioned_activations",
            "read as activation_checkpointing.partition_activations",
        ),
        Case({"aio": {"thread_count": 8}}, VALID, "aio.thread_count", "read as aio.intra_op_parallelism"),
        Case({"elasticity": {"prefer_large_batch": False}}, VALID, "elasticity.prefer_large_batch", "prefer_larger"),
        Case({"data_types": {"grad_accum_type": "fp32"}}, INVALID, "data_types.grad_accum_type", "grad_accum_dtype?"),
        Case({"expert_parallel": {"enable": True}}, INVALID, "expert_parallel.enable", "expert_parallel.enabled?"),
        *(
            Case({section: {"no_such_key": 1}}, INVALID, f"{section}.no_such_key", "DeepSpeed ignores it")
            for section in (
                "pipeline", "checkpoint", "flops_profiler", "elasticity", "data_efficiency", "curriculum_learning",
                "autotuning", "sparse_attention", "optimizer", "scheduler", "timers", "compression_training",
            )
        ),
    ],
    4: [
        Case({"disable_allgather": True}, VALID, "disable_allgather", "DeepSpeed does not read it either"),
        Case(zero(stage=2, allgather_partitions=False), VALID, "zero_optimization.allgather_partitions", "no effect"),
        Case({"pipeline": {"stages": 4}}, VALID, "pipeline.micro_batches", "cannot fill 4 stages", size=4),
        Case({"pipeline": {"seed_layers": True}}, VALID, "pipeline.seed_layers", "no effect"),
        Case({"data_efficiency": {"enabled": False}}, VALID, "data_efficiency.enabled", "only the switches inside"),
        Case({"sparse_attention": {"mode": "fixed"}}, LACKS, "sparse_attention"),
        Case({"activation_checkpointing": {"cpu_checkpointing": True}}, LACKS, "activation_checkpointing"),
        Case({"eigenvalue": {"enabled": True}}, VALID, "eigenvalue", "ignored at the top level there too"),
    ],
    5: [
        Case({"optimizer": {"name": "Adam", "params": {"lr": 1e-4}}}, INVALID, "optimizer.name", "optimizer.type?"),
        Case(
            {
                "data_efficiency": {
                    "data_routing": {
                        "enabled": False,
                        "random_ltd": {"enabled": True, "random_ltd_schedule": LTD_SCHEDULE},
                    }
                }
            },
            VALID,
            "data_efficiency.data_routing.enabled",
            "only the switches inside the section count",
        ),
    ],
    6: [
        Case({"optimizer": {"type": "Muon", "params": {"lr": 0.02, "nesterov": False, "ns_steps": 10}}}, VALID),
        Case(
            {"optimizer": {"type": "Muon", "params": {"nesterof": False}}},
            INVALID,
            "optimizer.params.nesterof",
            "DeepSpeed drops it without a word; did you mean nesterov?",
        ),
    ],
    7: [Case({"comms_logger": {"enabled": False}}, VALID, "comms_logger", "off here")],
    8: [Case({"datastates_ckpt": {"enabled": False}}, VALID, "datastates_ckpt", "any value but false")],
    9: [
        Case(
            {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}},
            INVALID,
            "bfloat16",
            "bf16, which is the same key",
        )
    ],
    10: [
        Case(
            zero(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=False),
            LACKS,
            "zero_optimization.cpu_offload_use_pin_memory",
            "DeepSpeed drops the value",
        )
    ],
    11: [
        Case(
            zero(stage=2, cpu_offload=False, offload_optimizer={"device": "none"}),
            VALID,
            "zero_optimization.cpu_offload",
            "nothing is offloaded by it",
        )
    ],
    48: [
        Case(zero(stage=2, offload_param={"device": "cpu"}), VALID, "zero_optimization.offload_param", "at stage 2"),
        Case(zero(stage=2, zero_quantized_weights=True), VALID, "zero_optimization.zero_quantized_weights", "stage 3"),
        Case(zero(stage=1, stage3_max_live_parameters=5), VALID, "zero_optimization.stage3_max_live_parameters", "3"),
        Case(zero(stage=2, zero_hpz_partition_size=2), INVALID, "zero_optimization.zero_hpz_partition_size", "stage 3"),
        Case(zero(stage=2, mics_shard_size=2), INVALID, "zero_optimization.mics_shard_size", "DeepSpeed ignores it"),
    ],
    49: [
        Case({**zero(stage=2), "pipeline": {"stages": 2}}, VALID, "zero_optimization.stage", "gradients stay", size=4)
    ],
    50: [
        Case({**zero(stage=1), "gradient_predivide_factor": 2.0}, VALID),
        Case(
            {"gradient_predivide_factor": 2.0, "prescale_gradients": True}, VALID, "gradient_predivide_factor", "no eff"
        ),
    ],
    51: [
        Case(
            {
                "communication_data_type": "fp16",
                "seq_parallel_communication_data_type": "bf16",
                "sequence_parallel_size": 2,
            },
            VALID,
            "seq_parallel_communication_data_type",
            "reduced with all others, in communication_data_type",
            size=2,
        )
    ],
    52: [
        Case(
            {**zero(stage=3), "bf16": {"enabled": True, "check_grad_overflow": False}},
            VALID,
            "bf16.check_grad_overflow",
            "is applied, not skipped, as asked",
        )
    ],
    53: [Case({"fp16": {"enabled": True, "hysteresis": 4}}, VALID)],
    54: [
        Case({"bf16": {"enabled": True}}, VALID, "data_types.grad_accum_dtype", "fp32 (DeepSpeed: in bf16)"),
        Case({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, VALID),
    ],
    55: [Case({"fp16": {"auto_cast": True}}, VALID, "fp16.auto_cast", "fp16 is off (DeepSpeed casts")],
    56: [
        Case(adam(weight_decay=0.1), VALID, "optimizer.type", "Adam is AdamW"),
        Case(
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
            VALID,
            "optimizer.params.adam_w_mode",
            "no effect",
        ),
        Case(adam(torch_adam=True), VALID, "optimizer.params.torch_adam", "torch's 0.01"),
    ],
    57: [Case({"optimizer": {"type": "Muon"}}, VALID)],
    58: [
        Case(adam(max_grad_norm=1.0), INVALID, "optimizer.params.max_grad_norm", "use gradient_clipping"),
    ],
    59: [
        Case({"optimizer": {"type": "OneBitAdam"}}, LACKS, "optimizer.type"),
        Case({"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True, "loss_scale": 128}}, VALID),
        Case({"optimizer": {"type": "SGD"}, **zero(stage=2)}, VALID),
    ],
    60: [
        Case({"amp": {"enabled": True}, **zero(stage=1)}, INVALID, "amp.enabled", "zero_optimization.stage is on"),
        Case({"amp": {"enabled": True}, "bf16": {"enabled": True}}, INVALID, "amp.enabled", "bf16.enabled is on"),
        Case({"amp": {"enabled": True}}, LACKS, "amp.enabled"),
    ],
    61: [
        Case(
            {"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}},
            INVALID,
            "torch_autocast.enabled",
            "switch off bf16 or torch_autocast",
        )
    ],
    62: [
        Case({"elasticity": {"enabled": True}}, INVALID, "train_micro_batch_size_per_gpu", "elasticity chooses"),
        Case({"elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True}}, LACKS, "elasticity.enabled"),
    ],
    63: [Case({"autotuning": {"enabled": True}}, LACKS, "autotuning.enabled")],
    64: [Case({"sequence_parallel_size": 2}, VALID, size=2)],
    65: [
        Case({"managed_gradient_accumulation": False}, VALID, "managed_gradient_accumulation", "every step() applies")
    ],
    66: [Case({"checkpoint": {"load_universal": True}}, VALID, "checkpoint.load_universal", "loads at any world size")],
    67: [
        Case(
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            LACKS,
            "activation_checkpointing.contiguous_memory_optimization",
            "without partition_activations and number_checkpoints",
        )
    ],
    68: [
        Case(
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            INVALID,
            "train_batch_size",
            "set train_batch_size to 8 or 16",
            size=2,
        ),
        Case({"train_batch_size": 2}, INVALID, "train_batch_size", "set train_batch_size to 4", size=4, more={}),
    ],
    69: [
        Case(zero(stage="auto"), NEEDS, "zero_optimization.stage"),
        Case({"bf16": {"enabled": "auto"}}, NEEDS, "bf16.enabled"),
        Case(
            zero(offload_optimizer={"device": "auto"}), NEEDS, "zero_optimization.offload_optimizer.device"
        ),
    ],
    70: [
        Case({"train_batch_size": "auto"}, NEEDS, "train_batch_size", more={}),
        Case({"gradient_clipping": "auto"}, VALID),
        Case(adam(lr="auto"), NEEDS, "optimizer.params.lr"),
        Case({"sparse_gradients": "auto"}, NEEDS, "sparse_gradients"),
    ],
    71: [
        Case(
            zero(stage=3, zeropp_loco_param={"err_beta": "auto"}),
            NEEDS,
            "zero_optimization.zeropp_loco_param.err_beta",
        ),
        Case(
            {"tensor_parallel": {"partition_config": {"strict_mode": "auto"}}},
            NEEDS,
            "tensor_parallel.partition_config.strict_mode",
        ),
    ],
}  # fmt: skip
