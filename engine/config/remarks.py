"""Notes about keys that are right and yet do not do what one may think, in any run.

What depends on the stage, the precision or the world is the plan's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.config import Config

_SERVICES = {
    "nebula": "Azure's checkpoint service",
    "datastates_ckpt": "the DataStates checkpoint service (in DeepSpeed any value but false switches it on)",
    "autotuning": "DeepSpeed's autotuner",
    "eigenvalue": "an input of DeepSpeed's quantization schedule, ignored at the top level there too",
    "weight_quantization": "quantized inference",
    "hybrid_engine": "DeepSpeed's engine for generation inside training",
}
_WITHOUT_EFFECT = {
    "optimizer.legacy_fusion": "an old fused step of DeepSpeed's",
    "pipeline.seed_layers": "DeepSpeed does not read it from the JSON either",
    "tensor_parallel.dtype": "the dtype of the model counts",
    "data_efficiency.enabled": "only the switches inside the section count, as in DeepSpeed",
    "data_efficiency.data_sampling.enabled": "only the switches inside the section count, as in DeepSpeed",
    "data_efficiency.data_routing.enabled": "only the switch inside the section counts, as in DeepSpeed",
}


def remarks(config: Config) -> Iterator[tuple[str, str]]:
    """Path and message of each note. Only what the user wrote is spoken of."""
    for key, what in _SERVICES.items():
        value = getattr(config, key)
        if value not in (None, False) and not (isinstance(value, dict) and value.get("enabled") is True):
            yield key, f"{what}: means nothing for training here"
    for path, why in _WITHOUT_EFFECT.items():
        if config.origin(path) == "user":
            yield path, f"has no effect here: {why}"
    if config.comms_logger is not None and not config.comms_logger.enabled:
        yield "comms_logger", "off here, because enabled is not true (DeepSpeed logs as soon as the section exists)"
    if config.checkpoint.load_universal:
        yield "checkpoint.load_universal", "not needed: every checkpoint here loads at any world size"
    offload = config.zero_optimization.offload_optimizer
    if offload is not None and config.origin("zero_optimization.offload_optimizer.device") == "default":
        yield "zero_optimization.offload_optimizer", 'device is not given, so it is "none": nothing is offloaded'
    offload_param = config.zero_optimization.offload_param
    if offload_param is not None and config.origin("zero_optimization.offload_param.device") == "default":
        yield "zero_optimization.offload_param", 'device is not given, so it is "none": nothing is offloaded'
