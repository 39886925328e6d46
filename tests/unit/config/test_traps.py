"""Mistakes that DeepSpeed lets through or answers badly, each with the verdict that a careful user would give."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import load_config
from engine.config.remarks import WITHOUT_EFFECT
from tests.unit.config.conftest import notes_of, problems_of
from tests.unit.config.trap_case import CURRICULUM, LTD_SCHEDULE

METRIC = {key: value for key, value in CURRICULUM.items() if key not in ("enabled", "curriculum_type")}

INVALID: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: config, path of the one problem, words in it
    "section misspelled": ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization?"),
    "monitor misspelled": ({"tensorbord": {"enabled": True}}, "tensorbord", "did you mean tensorboard?"),
    "key that DeepSpeed would ignore": (
        {"data_types": {"grad_accum_type": "fp32"}},
        "data_types.grad_accum_type",
        "DeepSpeed ignores it); did you mean data_types.grad_accum_dtype?",
    ),
    "enable for enabled": ({"expert_parallel": {"enable": True}}, "expert_parallel.enable", "expert_parallel.enabled?"),
    "key of another section": (
        {"checkpoint": {"partition_activations": True}},
        "checkpoint.partition_activations",
        "exists in activation_checkpointing",
    ),
    "section in the wrong place": (
        {"offload_optimizer": {"device": "cpu"}},
        "offload_optimizer",
        "exists in zero_optimization",
    ),
    "keys of the top level in a section": ({"log": {"steps_per_print": 5}}, "log", "steps_per_print at the top level"),
    "key of the top level in a section": (
        {"fp16": {"train_batch_size": 5}},
        "fp16.train_batch_size",
        "at the top level",
    ),
    "clipping in the optimizer": (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm",
        "use gradient_clipping",
    ),
    "argument that Muon drops": (
        {"optimizer": {"type": "Muon", "params": {"nesterof": False}}},
        "optimizer.params.nesterof",
        "did you mean nesterov?",
    ),
    "argument of another optimizer": (
        {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}},
        "optimizer.params.betas",
        "SGD has no such argument",
    ),
    "argument of another schedule": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_max_lr": 1}}},
        "scheduler.params.warmup_max_lr",
        "WarmupCosineLR has no such argument",
    ),
    "no such optimizer": ({"optimizer": {"type": "AdmaW"}}, "optimizer.type", "did you mean AdamW?"),
    "a module for an optimizer": ({"optimizer": {"type": "lr_scheduler"}}, "optimizer.type", "no optimizer"),
    "a module for a schedule": ({"scheduler": {"type": "math"}}, "scheduler.type", "no schedule"),
    "schedule without a type": ({"scheduler": {"params": {}}}, "scheduler.type", "is missing"),
    "warm-up of another kind": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
        "scheduler.params.warmup_type",
        '"log" or "linear"',
    ),
    "betas out of range": (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}},
        "optimizer.params.betas",
        "out of range",
    ),
    "one beta": (
        {"optimizer": {"type": "Adam", "params": {"betas": 0.9}}},
        "optimizer.params.betas",
        "list of two numbers",
    ),
    "negative lr": ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.params.lr", "0 or more"),
    "negative clipping": ({"gradient_clipping": -1}, "gradient_clipping", "a number >= 0"),
    "no hysteresis": ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis", "an integer >= 1"),
    "scale below one": ({"fp16": {"initial_scale_power": -3}}, "fp16.initial_scale_power", "0 to 126"),
    "minimum above the initial scale": (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
        "fp16.min_loss_scale",
        "above the initial scale 2^2 = 4",
    ),
    "no minimum scale": ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale", "a number > 0"),
    "no window": ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window", "an integer >= 1"),
    "autocast in integers": ({"torch_autocast": {"dtype": "int8"}}, "torch_autocast.dtype", '"bf16" or "fp16"'),
    "dtype cut short": ({"torch_autocast": {"dtype": "bfloat"}}, "torch_autocast.dtype", "not allowed here"),
    "accumulation in integers": ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype", '"fp32"'),
    "bf16 states without bf16 masters": (
        {"bf16": {"bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states",
        "needs bf16_master_weights_and_grads",
    ),
    "disk without a folder": (
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.nvme_path",
        'set "nvme_path"',
    ),
    "unknown device": (
        {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
        "zero_optimization.offload_optimizer.device",
        '"none", "cpu" or "nvme"',
    ),
    "LoCo misspelled": (
        {"zero_optimization": {"zeropp_loco_param": {"err_bta": 0.8}}},
        "zero_optimization.zeropp_loco_param.err_bta",
        "err_beta",
    ),
    "printing never": ({"steps_per_print": 0}, "steps_per_print", "an integer >= 1"),
    "batch of nothing": ({"train_batch_size": 0}, "train_batch_size", "an integer >= 1"),
    "curriculum by something else": (
        {"curriculum_learning": {**CURRICULUM, "curriculum_type": "vocabulary"}},
        "curriculum_learning.curriculum_type",
        "no effect in DeepSpeed",
    ),
    "curriculum without a schedule": (
        {"curriculum_learning": {**CURRICULUM, "schedule_config": {"difficulty_step": 8}}},
        "curriculum_learning.schedule_config.total_curriculum_step",
        "is missing",
    ),
    "curriculum that falls": (
        {"curriculum_learning": {**CURRICULUM, "min_difficulty": 128}},
        "curriculum_learning.min_difficulty",
        "above max_difficulty 64",
    ),
    "discrete schedule of unequal lists": (
        {
            "curriculum_learning": {
                **CURRICULUM,
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [8, 64], "max_step": [1, 2]},
            }
        },
        "curriculum_learning.schedule_config.max_step",
        "one less than difficulty",
    ),
    "sampling without metrics": (
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True, "data_cluster_path": "x"}}}},
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
        "at least one metric",
    ),
    "metric without a maximum": (
        {
            "data_efficiency": {
                "data_sampling": {
                    "curriculum_learning": {
                        "enabled": True,
                        "data_cluster_path": "x",
                        "curriculum_metrics": {"rarity": {**METRIC, "max_difficulty": None}},
                    }
                }
            }
        },
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.rarity.max_difficulty",
        "is missing",
    ),
    "dropped layers miscounted": (
        {
            "data_efficiency": {
                "data_routing": {
                    "random_ltd": {
                        "enabled": True,
                        "random_ltd_layer_num": 2,
                        "random_ltd_layer_id": [1],
                        "random_ltd_schedule": LTD_SCHEDULE,
                    }
                }
            }
        },
        "data_efficiency.data_routing.random_ltd.random_ltd_layer_id",
        "names 1 layers",
    ),
    "elastic batch too small": (
        {"elasticity": {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [8]}},
        "elasticity.micro_batch_sizes",
        "above max_train_batch_size",
    ),
    "elastic world upside down": (
        {"elasticity": {"min_gpus": 4, "max_gpus": 2}},
        "elasticity.max_gpus",
        "below min_gpus",
    ),
    "unknown sparse attention": (
        {"sparse_attention": {"mode": "longformer"}},
        "sparse_attention.mode",
        '"bslongformer"',
    ),
    "unknown log level": ({"log_level": "verbose"}, "log_level", '"debug"'),
    "bad tag validation": ({"checkpoint": {"tag_validation": "Always"}}, "checkpoint.tag_validation", '"Warn"'),
    "list entry of another type": (
        {
            "tensor_parallel": {
                "partition_config": {"layer_specs": [{"patterns": ["a"]}, {"partition_type": "diagonal"}]}
            }
        },
        "tensor_parallel.partition_config.layer_specs[1].partition_type",
        '"column", "row" or "skip"',
    ),
}


@pytest.mark.parametrize(("tree", "path", "words"), INVALID.values(), ids=INVALID.keys())
def test_a_mistake_is_refused_by_name(tree: dict[str, Any], path: str, words: str) -> None:
    (problem,) = problems_of(tree)
    assert problem.path == path
    assert words in problem.render()


VALID: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: config, path of the note that must be there, words in it
    "logger that DeepSpeed switches on": ({"comms_logger": {"enabled": False}}, "comms_logger", "off here"),
    "checkpoint service that DeepSpeed switches on": (
        {"datastates_ckpt": {"enabled": False}},
        "datastates_ckpt",
        "means nothing",
    ),
    "offloading to nowhere": (
        {"zero_optimization": {"offload_optimizer": {}}},
        "zero_optimization.offload_optimizer",
        '"none"',
    ),
    "outer switch that is not read": (
        {"data_efficiency": {"enabled": False}},
        "data_efficiency.enabled",
        "only the switches inside",
    ),
    "universal checkpoints": ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal", "not needed"),
    "section of a service": ({"nebula": {"enabled": False}}, "nebula", "means nothing for training here"),
    "generation": ({"hybrid_engine": {"max_out_tokens": 5}}, "hybrid_engine", "means nothing for training here"),
}


@pytest.mark.parametrize(("tree", "path", "words"), VALID.values(), ids=VALID.keys())
def test_what_is_right_but_surprising_is_noted(tree: dict[str, Any], path: str, words: str) -> None:
    assert words in notes_of(tree)[path]


SMP_VALUES: dict[str, Any] = {
    **{path: True for path in WITHOUT_EFFECT if path.startswith("smp.")},
    "smp.pipeline": "simple",
    "smp.optimize": "speed",
    "smp.default_partition": 2,
    "smp.contiguous": False,
    "smp.memory_weight": 0.5,
    "smp.activation_loading_horizon": 2,
    "smp.ddp_dist_backend": "nccl",
    "smp.allow_empty_shards": False,
}


@pytest.mark.parametrize(("path", "entry"), WITHOUT_EFFECT.items(), ids=WITHOUT_EFFECT.keys())
def test_what_has_no_effect_is_noted_where_it_asks_for_more(path: str, entry: tuple[str, tuple[Any, ...]]) -> None:
    why, harmless = entry
    other = {True: False, False: True, None: {"err_beta": 0.5} if "loco" in path else "2"}
    routing = "data_efficiency.data_routing.random_ltd.model_type"
    unlike = {"model.tiny": {"width": 8}, routing: "encoder", "pipeline.use_reentrant": False, **SMP_VALUES}
    for value in (*harmless, unlike[path] if path in unlike else other[harmless[0]] if harmless else 1):
        tree: Any = value
        for part in reversed(path.split(".")):
            tree = {part: tree}
        if path == "optimizer.legacy_fusion":
            tree["optimizer"]["type"] = "Adam"
        messages = notes_of(tree)
        assert (f"has no effect here: {why}" in messages.get(path, "")) == (value not in harmless)


@pytest.mark.parametrize("type_", ["my.optimizers.Fancy", "file.py:Fancy", "torch.optim.SGD"])
def test_arguments_of_a_class_of_ones_own_are_free(type_: str) -> None:
    config = load_config(
        {"optimizer": {"type": type_, "params": {"anything": [1, {"goes": True}], "max_grad_norm": 1}}}
    )
    assert config.optimizer is not None
    assert config.optimizer.params == {"anything": [1, {"goes": True}], "max_grad_norm": 1}


def test_layer_drop_has_defaults() -> None:
    config = load_config({"progressive_layer_drop": {"enabled": True}})
    assert config.progressive_layer_drop is not None
    assert (config.progressive_layer_drop.theta, config.progressive_layer_drop.gamma) == (0.5, 0.001)


NOT_BUILT: dict[str, dict[str, Any]] = {
    "optimizer.type": {"optimizer": {"type": "musgd"}},
    "amp.enabled": {"amp": {"enabled": True, "opt_level": "O1", "loss_scale": "dynamic"}},
    "bf16.bf16_master_weights_and_grads": {"bf16": {"bf16_master_weights_and_grads": True}},
    "zero_optimization.offload_optimizer.device": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "zero_optimization.zero_quantized_weights": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    "activation_checkpointing": {"activation_checkpointing": {"partition_activations": True}},
    "pipeline.stages": {"pipeline": {"stages": 2}},
    "tensor_parallel.size": {"tensor_parallel": {"autotp_size": 2}},
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "parallel.context_parallel": {"parallel": {"context_parallel": 2}},
    "curriculum_learning.enabled": {"curriculum_learning": CURRICULUM},
    "data_efficiency.data_routing.random_ltd.enabled": {
        "data_efficiency": {
            "enabled": False,
            "data_routing": {
                "enabled": False,
                "random_ltd": {"enabled": True, "random_ltd_schedule": LTD_SCHEDULE},
            },
        }
    },
    "progressive_layer_drop.enabled": {"progressive_layer_drop": {"enabled": True}},
    "sparse_attention": {"sparse_attention": {}},
    "compression_training": {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "elasticity.enabled": {"elasticity": {"enabled": True}},
    "flops_profiler.enabled": {"flops_profiler": {"enabled": True}},
    "comms_logger.enabled": {"comms_logger": {"enabled": True}},
    "autotuning.enabled": {"autotuning": {"enabled": True}},
}


@pytest.mark.parametrize(("path", "tree"), NOT_BUILT.items(), ids=NOT_BUILT.keys())
def test_a_feature_that_is_switched_on_is_known_and_not_built(path: str, tree: dict[str, Any]) -> None:
    from engine.config import built

    expected = (path,) if path in built.NOT_BUILT else ()
    assert load_config(tree).not_built == expected


def test_a_feature_that_is_switched_off_is_silent() -> None:
    off = {
        "amp": {"enabled": False},
        "zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}},
        "activation_checkpointing": {"partition_activations": False},
        "pipeline": {"stages": 1},
        "tensor_parallel": {"autotp_size": 1},
        "curriculum_learning": {"enabled": False},
        "data_efficiency": {"data_routing": {"random_ltd": {"enabled": False}}, "data_sampling": {}},
        "progressive_layer_drop": {"enabled": False},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "elasticity": {"enabled": False},
        "flops_profiler": {"enabled": False},
        "autotuning": {"enabled": False},
    }
    assert load_config(off).not_built == ()
