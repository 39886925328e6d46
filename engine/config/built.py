"""What this engine does not have yet: JSON path -> whether a config switches it on.

One line per feature. Building a feature ends with deleting its line. Such a config is valid, and `train` refuses it
by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.config.sections.compression import TechniqueSection

if TYPE_CHECKING:
    from engine.config.config import Config
    from engine.config.sections.zero import ZeroSection


def _on(section: Any) -> bool:
    return section is not None and bool(section.enabled)


def _optimizer(*names: str) -> Callable[[Config], bool]:
    return lambda config: config.optimizer is not None and config.optimizer.type in names


def _offloads(section: Any) -> bool:
    return section is not None and section.device != "none"


def _at_stage_3(is_on: Callable[[ZeroSection], bool]) -> Callable[[Config], bool]:
    """Below stage 3 the setting means nothing, which the plan says."""

    def switched_on(config: Config) -> bool:
        zero = config.zero_optimization
        may_be_3 = zero.stage == 3 or "zero_optimization.stage" in config.autos
        return may_be_3 and is_on(zero)

    return switched_on


def _technique(settings: Any) -> bool:
    """Whether a compression technique is switched on."""
    return _on(settings.shared_parameters if isinstance(settings, TechniqueSection) else settings)


def _sampling(config: Config) -> Any:
    return config.data_efficiency.data_sampling if config.data_efficiency else None


def _token_drop(config: Config) -> Any:
    """Where it is switched on."""
    routing = config.data_efficiency.data_routing if config.data_efficiency else None
    return routing.random_ltd if routing is not None and _on(routing.random_ltd) else None


def checkpoints_activations(config: Config) -> bool:
    section = config.activation_checkpointing
    return section is not None and bool(
        section.partition_activations
        or section.cpu_checkpointing
        or section.contiguous_memory_optimization
        or section.number_checkpoints
    )


NOT_BUILT: dict[str, Callable[[Config], bool]] = {
    "optimizer.type": _optimizer("MuAdam", "MuAdamW", "MuSGD"),
    "amp.enabled": lambda config: config.amp.enabled,
    "fp16.fp16_master_weights_and_grads": lambda config: config.fp16.fp16_master_weights_and_grads,
    "bf16.bf16_master_weights_and_grads": lambda config: config.bf16.bf16_master_weights_and_grads,
    "bf16.bf16_optimizer_states": lambda config: config.bf16.bf16_optimizer_states,
    "zero_optimization.offload_optimizer.device": lambda config: _offloads(config.zero_optimization.offload_optimizer),
    "zero_optimization.offload_param.device": _at_stage_3(lambda zero: _offloads(zero.offload_param)),
    "zero_optimization.zenflow": lambda config: config.zero_optimization.zenflow is not None,
    "zero_optimization.zero_quantized_weights": _at_stage_3(lambda zero: zero.zero_quantized_weights),
    "zero_optimization.zero_quantized_nontrainable_weights": _at_stage_3(
        lambda zero: zero.zero_quantized_nontrainable_weights
    ),
    "zero_optimization.zero_quantized_gradients": _at_stage_3(lambda zero: zero.zero_quantized_gradients),
    "activation_checkpointing": checkpoints_activations,
    "pipeline.activation_checkpoint_interval": (
        lambda config: config.pipeline is not None and config.pipeline.activation_checkpoint_interval > 0
    ),
    "expert_parallel.enabled": lambda config: _on(config.expert_parallel),
    "data_efficiency.data_sampling.dynamic_batching.enabled": (
        lambda config: _sampling(config) is not None and _on(_sampling(config).dynamic_batching)
    ),
    "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled": (
        lambda config: _token_drop(config) is not None and _on(_token_drop(config).layer_token_lr_schedule)
    ),
    "sparse_attention": lambda config: config.sparse_attention is not None,
    "compression_training": lambda config: (
        config.compression_training is not None
        and any(_technique(settings) for _, settings in config.compression_training)
    ),
    "compile.deepcompile": lambda config: config.compile is not None and config.compile.deepcompile,
    "elasticity.enabled": lambda config: _on(config.elasticity),
    "comet.enabled": lambda config: config.comet.enabled,
    "flops_profiler.enabled": lambda config: config.flops_profiler.enabled,
    "comms_logger.enabled": lambda config: _on(config.comms_logger),
    "checkpoint.writer": lambda config: config.checkpoint.writer is not None,
    "autotuning.enabled": lambda config: _on(config.autotuning),
    "hybrid_engine.enabled": lambda config: _on(config.hybrid_engine),
}
