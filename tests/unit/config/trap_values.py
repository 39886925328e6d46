"""Traps 14 to 47: values of a wrong type or meaning."""

from __future__ import annotations

from tests.unit.config.trap_case import (
    CURRICULUM,
    DISCRETE,
    INVALID,
    LACKS,
    LTD_SCHEDULE,
    VALID,
    Case,
    adam,
    schedule,
    zero,
)

VALUES: dict[int, list[Case]] = {
    14: [
        Case({"sparse_gradients": "False"}, VALID, "sparse_gradients", "read as false"),
        Case({"sparse_gradients": "False,"}, INVALID, "sparse_gradients", "true or false"),
    ],
    15: [
        Case({"prescale_gradients": "false"}, VALID, "prescale_gradients", "read as false"),
        Case({"checkpoint": {"load_universal": "false"}}, VALID, "checkpoint.load_universal", "read as false"),
        Case({"managed_gradient_accumulation": "no"}, VALID, "managed_gradient_accumulation", "read as false"),
    ],
    16: [
        Case(zero(stage=True), INVALID, "zero_optimization.stage", "an integer from 0 to 3"),
        Case(zero(stage="2"), VALID, "zero_optimization.stage", "read as 2"),
        Case(zero(reduce_bucket_size=True), INVALID, "zero_optimization.reduce_bucket_size", "an integer >= 0"),
        Case(zero(reduce_bucket_size=0), VALID),
    ],
    17: [
        Case(zero(reduce_bucket_size="5e8"), VALID, "zero_optimization.reduce_bucket_size", "leave out the quotes"),
        Case({"gradient_clipping": "1.0"}, VALID, "gradient_clipping", "read as 1.0"),
    ],
    18: [
        Case({"gradient_clipping": None}, INVALID, "gradient_clipping", "a number >= 0"),
        Case({"gradient_clipping": -1}, INVALID, "gradient_clipping", "a number >= 0"),
        Case({}, VALID, "gradient_clipping", "clipped to norm 1 as in DeepSpeed; 0 switches clipping off"),
    ],
    19: [
        Case({"train_micro_batch_size_per_gpu": 2.5}, INVALID, "train_micro_batch_size_per_gpu", "a whole number"),
        Case({"train_batch_size": "32"}, VALID, "train_batch_size", "read as 32"),
    ],
    20: [Case({"sequence_parallel_size": 2}, VALID, size=2)],
    21: [Case({"fp16": {"hysteresis": 0}}, INVALID, "fp16.hysteresis", "an integer >= 1")],
    22: [
        Case({"fp16": {"initial_scale_power": -3}}, INVALID, "fp16.initial_scale_power", "from 0 to 126"),
        Case(
            {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
            INVALID,
            "fp16.min_loss_scale",
            "the first overflow would raise the scale",
        ),
    ],
    23: [
        Case({"torch_autocast": {"dtype": "int8"}}, INVALID, "torch_autocast.dtype", '"bf16" or "fp16"'),
        Case({"torch_autocast": {"dtype": "bfloat"}}, INVALID, "torch_autocast.dtype", '"bf16" or "fp16"'),
        Case({"torch_autocast": {"enabled": True}}, VALID, "torch_autocast.dtype", "computes in bf16"),
    ],
    24: [Case({"data_types": {"grad_accum_dtype": "int8"}}, INVALID, "data_types.grad_accum_dtype", '"fp32"')],
    25: [
        Case({"communication_data_type": 16}, INVALID, "communication_data_type", '"fp32", "fp16" or "bf16"'),
        Case({"communication_data_type": "auto"}, VALID),
    ],
    26: [
        Case({"optimizer": {"type": "sgd"}}, VALID, "optimizer.type", "read as SGD"),
        Case({"optimizer": {"type": "lr_scheduler"}}, INVALID, "optimizer.type", "there is no optimizer"),
        Case({"optimizer": {"type": "sgdd"}}, INVALID, "optimizer.type", "did you mean SGD?"),
    ],
    27: [
        Case({"scheduler": {"type": "math"}}, INVALID, "scheduler.type", "there is no schedule"),
        Case({**adam(), "scheduler": {"type": "warmuplr"}}, VALID, "scheduler.type", "read as WarmupLR"),
    ],
    28: [
        Case({**adam(), "scheduler": {"type": "WarmupLR"}}, VALID),
        Case({**adam(), "scheduler": {"type": "WarmupDecayLR"}}, INVALID, "scheduler.params.total_num_steps", "needs"),
    ],
    29: [
        Case(schedule("WarmupLR", warmup_num_steps=100.0), VALID, "scheduler.params.warmup_num_steps", "integers"),
        Case(schedule("WarmupLR", warmup_num_steps=0), VALID, "scheduler.params.warmup_num_steps", "no warm-up"),
        Case(schedule("WarmupLR", warmup_num_steps=1), VALID, "scheduler.params.warmup_num_steps", "read as 2"),
    ],
    30: [Case(schedule("WarmupLR", warmup_type="cosine"), INVALID, "scheduler.params.warmup_type", "takes \"log\"")],
    31: [Case({**schedule("CosineAnnealingLR", T_max=100), **zero(stage=2), "bf16": {"enabled": True}}, VALID)],
    32: [
        Case(
            schedule("WarmupDecayLR", total_num_steps=10, warmup_num_steps=20),
            VALID,
            "scheduler.params.warmup_num_steps",
            "longer than the schedule",
        )
    ],
    33: [
        Case(
            schedule("OneCycle", cycle_min_lr=0, cycle_max_lr=1),
            VALID,
            "scheduler.params.cycle_momentum",
            "the second beta is left alone",
        )
    ],
    34: [
        Case({"zero_optimization": 2}, INVALID, "zero_optimization", 'write {"stage": 2}'),
        Case({"zero_optimization": None}, VALID, "zero_optimization", "the defaults of this section stand"),
        Case({"bf16": True}, INVALID, "bf16", 'write {"enabled": true}'),
    ],
    35: [Case(zero(sub_group_size=0.9), INVALID, "zero_optimization.sub_group_size", "only a whole number")],
    36: [
        Case(
            zero(stage=3, offload_param={"device": "nvme"}),
            INVALID,
            "zero_optimization.offload_param.nvme_path",
            'set "nvme_path"',
        )
    ],
    37: [
        Case(zero(offload_optimizer={}), VALID, "zero_optimization.offload_optimizer", "nothing is offloaded"),
        Case(
            zero(offload_optimizer={"pin_memory": True}), VALID, "zero_optimization.offload_optimizer", "nothing is off"
        ),
        Case(
            zero(offload_optimizer={"device": "CPU"}),
            LACKS,
            "zero_optimization.offload_optimizer.device",
            'read as "cpu"',
        ),
    ],
    38: [
        Case(
            zero(zeropp_loco_param={"err_bta": 0.8}),
            INVALID,
            "zero_optimization.zeropp_loco_param.err_bta",
            "err_beta?",
        )
    ],
    39: [Case({"tensor_parallel": {"dtype": "bf16"}}, VALID, "tensor_parallel.dtype", "the dtype of the model counts")],
    40: [Case({"tensorboard": {"output_path": None}}, VALID, "tensorboard.output_path", "the default stands")],
    41: [
        Case({"steps_per_print": 0}, INVALID, "steps_per_print", "an integer >= 1"),
        Case({"wall_clock_breakdown": True, "pipeline": {"stages": 2}}, VALID, size=2),
    ],
    42: [
        Case({"pipeline": {"partition": "type:\\S+Block"}}, VALID),
        Case({"pipeline": {"partition": "type:(Block"}}, INVALID, "pipeline.partition", "no regular expression"),
    ],
    43: [
        Case({"progressive_layer_drop": {"theta": 0.5}}, VALID, "progressive_layer_drop", "enabled is not given"),
        Case({"progressive_layer_drop": {"enabled": True}}, VALID),
        Case({"progressive_layer_drop": {"enabled": True, "theta": 0}}, INVALID, "progressive_layer_drop.theta"),
        Case({"curriculum_learning": {"min_difficulty": 8}}, VALID, "curriculum_learning", "enabled is not given"),
        Case({"amp": {"opt_level": "O1"}}, VALID, "amp", "enabled is not given"),
    ],
    44: [
        Case(
            {"curriculum_learning": {key: value for key, value in CURRICULUM.items() if key != "curriculum_type"}},
            VALID,
        ),
        Case(
            {"curriculum_learning": {**CURRICULUM, "curriculum_type": "rarity"}},
            INVALID,
            "curriculum_learning.curriculum_type",
            "no effect in DeepSpeed",
        ),
    ],
    45: [
        Case(
            {"curriculum_learning": {**CURRICULUM, **DISCRETE}},
            INVALID,
            "curriculum_learning.schedule_config.difficulty",
            "holds 128, which is never reached",
        ),
        Case(
            {"curriculum_learning": {**CURRICULUM, "min_difficulty": 10}},
            INVALID,
            "curriculum_learning.schedule_config.difficulty_step",
            "8 does not divide min_difficulty 10",
        ),
        Case(
            {"curriculum_learning": {**CURRICULUM, "min_difficulty": 10, "compat": "deepspeed"}},
            VALID,
            "curriculum_learning.min_difficulty",
            "so the first is 8",
        ),
    ],
    46: [
        Case(
            {
                "data_efficiency": {
                    "data_routing": {
                        "random_ltd": {
                            "enabled": True,
                            "random_ltd_layer_id": [1, 2],
                            "random_ltd_schedule": LTD_SCHEDULE,
                        }
                    }
                }
            },
            VALID,
        )
    ],
    47: [
        Case(
            {"flops_profiler": {"enabled": True, "profile_step": 9}, "training": {"steps": 3}},
            LACKS,
            "flops_profiler.profile_step",
            "never reached",
        )
    ],
}  # fmt: skip
