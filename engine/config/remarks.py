"""Notes about keys that are right and yet do not do what one may think, in any run.

What depends on the stage, the precision or the world is the plan's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine.config.sections.base import Section
from engine.config.smp import WITHOUT_EFFECT as SMP_WITHOUT_EFFECT

if TYPE_CHECKING:
    from engine.config.config import Config

SERVICES = {
    "nebula": "Azure's checkpoint service",
    "datastates_ckpt": "the DataStates checkpoint service (in DeepSpeed any value but false switches it on)",
    "autotuning": "DeepSpeed's autotuner",
    "eigenvalue": "an input of DeepSpeed's quantization schedule, ignored at the top level there too",
    "weight_quantization": "quantized inference",
    "hybrid_engine": "DeepSpeed's engine for generation inside training",
}
SPOKEN_FOR = frozenset({*SERVICES, "comms_logger", "data_efficiency", "data_sampling", "data_routing"})
"""Sections whose switch is not read, or of which another note speaks."""

NOT_SWITCHED_ON = "off: enabled is not given"
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
    "pipeline.use_reentrant": ("no layer is computed again for its activations", (None,)),
    "pipeline.pipe_partitioned": ("stages are not split over tensor-parallel ranks", (True,)),
    "pipeline.grad_partitioned": ("stages are not split over tensor-parallel ranks", (True,)),
    "pipeline.seed_layers": ("DeepSpeed does not read it from the JSON either", (False,)),
    "tensor_parallel.dtype": ("the dtype of the model counts", (None,)),
    "model.tiny": ("training uses model.args; these are for quick trials", ({},)),
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
    "data_efficiency.data_routing.random_ltd.model_type": ("masks follow the tokens in every model", ()),
    "data_efficiency.data_routing.random_ltd.global_batch_size": ("the batch of the run counts", (None,)),
    "data_efficiency.data_routing.random_ltd.micro_batch_size": ("the batch of the run counts", (None,)),
    **SMP_WITHOUT_EFFECT,
}
"""Path -> why it has no effect, and the values that need no note because they ask for what happens anyway.

Building a feature that reads one of these ends with deleting its line.
"""


def remarks(config: Config) -> Iterator[tuple[str, str]]:
    """Path and message of each note. Only what the user wrote is spoken of."""
    not_built = config.not_built
    for key, what in SERVICES.items():
        if getattr(config, key) not in (None, False) and f"{key}.enabled" not in not_built:
            yield key, f"{what}: means nothing for training here"
    uses_disk = any(section is not None and section.device == "nvme" for section in _offloads(config))
    for path, (why, harmless) in WITHOUT_EFFECT.items():
        if path.startswith("aio.") and uses_disk:
            continue
        if _value(config, path) not in harmless and config.origin(path) == "user":
            yield path, f"has no effect here: {why}"
    yield from _switches(config, config, "")
    yield from _offload_devices(config)
    yield from _readings(config)


def _readings(config: Config) -> Iterator[tuple[str, str]]:
    """Where DeepSpeed and this engine read the same section otherwise."""
    if config.comms_logger is not None and not config.comms_logger.enabled:
        yield "comms_logger", "off here, because enabled is not true (DeepSpeed logs as soon as the section exists)"
    if config.fp16.auto_cast and not config.fp16.enabled and "fp16.enabled" not in config.autos:
        message = "no effect: fp16 is off (DeepSpeed casts the inputs to fp16 all the same)"
        yield "fp16.auto_cast", message
    recompute = config.activation_checkpointing
    if recompute is not None and recompute.contiguous_memory_optimization:
        needs = [key for key in ("partition_activations", "number_checkpoints") if not getattr(recompute, key)]
        if needs and not {f"activation_checkpointing.{key}" for key in needs} & config.autos:
            path = "activation_checkpointing.contiguous_memory_optimization"
            yield path, f"DeepSpeed's checkpointing.configure() refuses it without {' and '.join(needs)}"
    curriculum = config.curriculum_learning
    if curriculum is not None and curriculum.enabled and curriculum.schedule_config is not None:
        step, low = curriculum.schedule_config.difficulty_step, curriculum.min_difficulty
        paced = curriculum.schedule_type in ("fixed_linear", "fixed_root")
        if curriculum.compat == "deepspeed" and paced and step and low and low % step:
            yield (
                "curriculum_learning.min_difficulty",
                f"difficulties are multiples of difficulty_step {step}, so the first is {low - low % step}",
            )
    if config.checkpoint.load_universal:
        yield "checkpoint.load_universal", "not needed: every checkpoint here loads at any world size"


def _offloads(config: Config) -> tuple[Any, Any]:
    return config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param


def _offload_devices(config: Config) -> Iterator[tuple[str, str]]:
    for key, section in zip(("offload_optimizer", "offload_param"), _offloads(config), strict=True):
        path = f"zero_optimization.{key}"
        device = f"{path}.device"
        if section is not None and config.origin(device) == "default" and device not in config.autos:
            yield path, 'device is not given, so it is "none": nothing is offloaded'


def _switches(config: Config, section: Section, above: str) -> Iterator[tuple[str, str]]:
    """Sections that are written with settings and without their switch, which is off."""
    for key in type(section).model_fields:
        inner = getattr(section, key)
        if not isinstance(inner, Section):
            continue
        path = above + key
        switch = type(inner).model_fields.get("enabled")
        is_off = switch is not None and switch.default is False and "enabled" not in inner.model_fields_set
        if is_off and inner.model_fields_set and f"{path}.enabled" not in config.autos and key not in SPOKEN_FOR:
            yield path, NOT_SWITCHED_ON
        yield from _switches(config, inner, path + ".")


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if value is None:
            return None
        value = getattr(value, key)
    return value
