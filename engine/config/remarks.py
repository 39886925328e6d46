"""Notes about keys that are right and yet do not do what one may think, in any run.

What depends on the stage, the precision or the world is the plan's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
_SWITCHES_INSIDE = "only the switches inside the section count, as in DeepSpeed"

WITHOUT_EFFECT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "zero_allow_untested_optimizer": ("every optimizer is allowed at every stage", (True,)),
    "zero_force_ds_cpu_optimizer": ("there is no separate optimizer for the CPU", (False,)),
    "optimizer.legacy_fusion": ("an old fused step of DeepSpeed's", (False,)),
    "sparse_gradients": ("embedding gradients are reduced dense: the same result, more bytes", (False,)),
    "disable_allgather": ("DeepSpeed does not read it either", (False,)),
    "graph_harvesting": ("clipping is not captured in CUDA graphs", (False,)),
    "zero_optimization.zeropp_loco_param": ("gradients are not reduced in low precision", (None,)),
    "aio.block_size": ("nothing is offloaded to disk", ()),
    "aio.queue_depth": ("nothing is offloaded to disk", ()),
    "aio.intra_op_parallelism": ("nothing is offloaded to disk", ()),
    "aio.single_submit": ("nothing is offloaded to disk", ()),
    "aio.overlap_events": ("nothing is offloaded to disk", ()),
    "aio.use_gds": ("nothing is offloaded to disk", (False,)),
    "pipeline.seed_layers": ("DeepSpeed does not read it from the JSON either", (False,)),
    "tensor_parallel.dtype": ("the dtype of the model counts", (None,)),
    "model.tiny": ("training uses model.args; these are for quick trials", ({},)),
    "data_parallel_size": ("the number of data-parallel ranks follows from the world size", (None,)),
    "use_data_before_expert_parallelism": ("the mesh has no expert axis", (False,)),
    "memory_breakdown": ("memory is not reported phase by phase", (False,)),
    "dump_state": ("the resolved plan is printed instead", (False,)),
    "timers.throughput.enabled": ("throughput is always measured", (True,)),
    "timers.throughput.synchronized": ("throughput is measured from step to step, which needs no waiting", (False,)),
    "checkpoint.use_node_local_storage": ("every rank writes its own part into one folder", (False,)),
    "checkpoint.parallel_write.pipeline_stage": ("every rank always writes its own part", (True,)),
    "checkpoint.checkpoint_serialization": ("nothing is pickled in a checkpoint", ()),
    "data_efficiency.enabled": (_SWITCHES_INSIDE, ()),
    "data_efficiency.data_sampling.enabled": (_SWITCHES_INSIDE, ()),
    "data_efficiency.data_sampling.num_epochs": ("samples are drawn for as long as training goes on", ()),
    "data_efficiency.data_sampling.pin_memory": ("batches for an accelerator are always pinned", (True,)),
    "data_efficiency.data_routing.enabled": (_SWITCHES_INSIDE, ()),
}
"""Path -> why it has no effect, and the values that need no note because they ask for what happens anyway.

Building a feature that reads one of these ends with deleting its line.
"""


def remarks(config: Config) -> Iterator[tuple[str, str]]:
    """Path and message of each note. Only what the user wrote is spoken of."""
    for key, what in _SERVICES.items():
        value = getattr(config, key)
        if value not in (None, False) and not (isinstance(value, dict) and value.get("enabled") is True):
            yield key, f"{what}: means nothing for training here"
    for path, (why, harmless) in WITHOUT_EFFECT.items():
        if config.origin(path) == "user" and _value(config, path) not in harmless:
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


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = getattr(value, key)
    return value
