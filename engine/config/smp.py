"""SageMaker's parameters under ``"smp"``: each with a counterpart moves to it, with a note.

Works on plain JSON, before anything is typed. A value that is no value of its key stays where it is, for the section's
own types to refuse. What has no counterpart stays in the section: it is noted (WITHOUT_EFFECT), refused by the section,
or checked where the world is known (engine/plan/smp.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config.messages import show
from engine.config.places import Path, join_path
from engine.config.translation import Translation, truth

SMP = "smp"
Target = tuple[Path, Any]

PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}

NUMBERS: dict[str, tuple[int, Path]] = {
    "pipeline_parallel_degree": (1, ("pipeline", "stages")),
    "partitions": (1, ("pipeline", "stages")),
    "tensor_parallel_degree": (1, ("tensor_parallel", "size")),
    "context_parallel_degree": (1, ("parallel", "context_parallel")),
    "microbatches": (1, ("gradient_accumulation_steps",)),
    "random_seed": (0, ("seed",)),
}
"""Key -> its least value, and the key that takes it as it is."""

SHARDED_NUMBERS: dict[str, tuple[int, Path]] = {
    "sdp_reduce_bucket_size": (1, ("zero_optimization", "reduce_bucket_size")),
    "sdp_param_persistence_threshold": (0, ("zero_optimization", "param_persistence_threshold")),
    "sdp_max_live_parameters": (1, ("zero_optimization", "max_live_parameters")),
}
"""The same; they count with sharded_data_parallel_degree only."""

SWITCHES: dict[str, Target] = {
    "fp16": (("fp16", "enabled"), True),
    "fp16_params": (("fp16", "enabled"), True),
    "bf16": (("bf16", "enabled"), True),
    "offload_activations": (("activation_checkpointing", "cpu_checkpointing"), True),
    "sm_activation_offloading": (("activation_checkpointing", "cpu_checkpointing"), True),
}
"""Key -> what true asks for; false asks for nothing."""

_TRACING = "the model is not traced"
WITHOUT_EFFECT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "smp.pipeline": ("the order of micro-batches in a pipeline is the engine's own; it does not change the sums", ()),
    "smp.optimize": ("SMP's own layers are not used", ()),
    "smp.auto_partition": ("pipeline.partition says how the layers are dealt out", ()),
    "smp.default_partition": ("it only counts without auto_partition, in SMP as well", (None,)),
    "smp.contiguous": ("it belongs to TensorFlow; stages here are always contiguous", (True, None)),
    "smp.memory_weight": ("pipeline.partition says how the layers are dealt out", (None,)),
    "smp.deterministic_server": ("stages exchange in a fixed order, not through a server", (None,)),
    "smp.activation_loading_horizon": ("when offloaded activations come back does not change results", (None,)),
    "smp.skip_tracing": (_TRACING, (None,)),
    "smp.ddp_dist_backend": ("the backend follows from the device", ("auto", None)),
    "smp.delayed_parameter_initialization": (
        "a model that is built on the meta device is filled after it is cut, any other is taken as it is",
        (None,),
    ),
    "smp.static_mode": ("it is a switch of SMP's pipeline", (None,)),
    "smp.fast_mode": ("it is a switch of SMP's pipeline", (None,)),
    "smp.fsdp_cache_flush_warnings": ("there is no such warning", (None,)),
    "smp.allow_empty_shards": ("ranks may always hold nothing of a small parameter", (True, None)),
}
"""Path -> why a key has no effect, and the values that need no note; part of the table in engine/config/remarks.py."""


def translate_smp(translation: Translation) -> None:
    """Move every parameter that has a counterpart. Running it twice changes nothing."""
    section = translation.get((SMP,))
    if not isinstance(section, dict):
        return
    for key, (least, target) in NUMBERS.items():
        _move(translation, key, _number(section.get(key), least), lambda value, target=target: ((target, value),))
    _move(translation, "placement_strategy", _placement(section.get("placement_strategy")), _place)
    for key, asked in SWITCHES.items():
        _move(translation, key, truth(section.get(key)), lambda value, asked=asked: (asked,) if value else ())
    _move(translation, "shard_optimizer_state", truth(section.get("shard_optimizer_state")), _stage_one(translation))
    _move(
        translation,
        "expert_parallel_degree",
        _number(section.get("expert_parallel_degree"), 1),
        lambda value: (
            ((("expert_parallel", "enabled"), True), (("expert_parallel", "autoep_size"), value)) if value > 1 else ()
        ),
    )
    _sharded_data_parallel(translation, section)
    _hybrid_shard(translation, section)


def _sharded_data_parallel(translation: Translation, section: Mapping[str, Any]) -> None:
    path = (SMP, "sharded_data_parallel_degree")
    zero = translation.get(("zero_optimization",))
    moved = translation.places.moved.get(("zero_optimization", "mics_shard_size"))
    degree = _number(section.get(path[1]), 1)
    if degree is None and moved == path and isinstance(zero, dict):
        degree = zero.get("mics_shard_size")  # translated before, and then overridden elsewhere
    is_on = isinstance(degree, int) and degree > 1
    stages = translation.get(("pipeline",))
    if is_on and path[1] in section and isinstance(stages, dict) and stages.get("stages") not in ("auto", 0, 1, None):
        translation.problem(
            path,
            f"is {degree}, and {translation.written(('pipeline', 'stages'))} is {stages['stages']}: SMP shards "
            "parameters only without a pipeline",
            "conflict",
            found=degree,
            repair="keep one of them, or write zero_optimization and pipeline themselves",
        )
    _move(translation, path[1], degree if path[1] in section else None, _sharded_in_groups)
    for key, (least, target) in SHARDED_NUMBERS.items():
        _move_sharded(translation, key, _number(section.get(key), least), target, is_on)
    switch = truth(section.get("sdp_hierarchical_allgather"))
    target = ("zero_optimization", "mics_hierarchical_params_gather")
    _move_sharded(translation, "sdp_hierarchical_allgather", switch, target, is_on)
    clipping = section.get("sdp_gradient_clipping")
    is_number = isinstance(clipping, int | float) and not isinstance(clipping, bool) and clipping >= 0
    _move_sharded(translation, "sdp_gradient_clipping", clipping if is_number else None, ("gradient_clipping",), is_on)


def _move_sharded(translation: Translation, key: str, value: Any, target: Path, is_on: bool) -> None:
    if value is None or is_on:
        _move(translation, key, value, lambda value: ((target, value),))
        return
    translation.pop((SMP, key))
    translation.note((SMP, key), "has no effect without sharded_data_parallel_degree above 1, in SMP as well")


def _sharded_in_groups(degree: int) -> tuple[Target, ...]:
    stage, group = ("zero_optimization", "stage"), ("zero_optimization", "mics_shard_size")
    return ((stage, 3), (group, degree)) if degree > 1 else ()


def _hybrid_shard(translation: Translation, section: Mapping[str, Any]) -> None:
    """Version 2: groups of so many ranks shard; context-parallel ranks are among them."""
    key = "hybrid_shard_degree"
    degree = _number(section.get(key), 0)
    parallel = translation.get(("parallel",))
    context = (_number(parallel.get("context_parallel"), 1) if isinstance(parallel, dict) else None) or 1
    if degree is not None and degree > 1 and degree % context:
        translation.problem(
            (SMP, key),
            f"{degree} ranks that share parameters are no whole number of groups of {context} context-parallel ranks",
            "conflict",
            found=degree,
            allowed=f"a multiple of {context}",
        )
        translation.pop((SMP, key))
        return
    stage = ("zero_optimization", "stage")

    def targets(degree: int) -> tuple[Target, ...]:
        if degree < 2:
            return ((stage, 0 if degree else 3),)
        return _sharded_in_groups(degree // context) or ((stage, 3),)

    _move(translation, key, degree, targets)


def _stage_one(translation: Translation) -> Any:
    """Optimizer state is sharded from stage 1 on, so a higher stage that is given agrees with it."""
    zero = translation.get(("zero_optimization",))
    stage = zero.get("stage") if isinstance(zero, dict) else None
    path = ("zero_optimization", "stage")
    return lambda value: ((path, stage if stage in (2, 3) else 1),) if value else ()


def _placement(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    letters = PLACEMENTS.get(value.lower(), value.upper())
    return letters if sorted(letters) == ["D", "P", "T"] else None


def _place(value: str) -> tuple[Target, ...]:
    return ((("parallel", "placement"), value),)


def _number(value: Any, least: int) -> int | None:
    """An integer that is a value of its key, however it is written; None for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def _move(translation: Translation, key: str, value: Any, targets: Any) -> None:
    """Put what ``value`` of ``key`` asks for in its places, and say so. None: the key is not there, or is wrong."""
    path = (SMP, key)
    if value is None or not translation.has(path):
        return
    written = translation.pop(path)
    asked: tuple[Target, ...] = targets(value)
    for target, wanted in asked:
        _put(translation, path, written, target, wanted)
    if asked:
        meaning = ", ".join(f"{join_path(target)} = {show(wanted)}" for target, wanted in asked)
        translation.note(path, f"read as {meaning}{_REMARKS.get(key, '')}")
    elif type(written) is not type(value):
        translation.note(path, f"{show(written)} is read as {show(value)}, which asks for nothing")


_REMARKS = {
    "microbatches": "; a micro-batch is train_micro_batch_size_per_gpu samples",
    "fp16": ", with loss scaling as the section fp16 says (SMP sets it in code)",
    "fp16_params": ": masters are kept in fp32, and loss scaling is as the section fp16 says",
}


def _put(translation: Translation, path: Path, written: Any, target: Path, wanted: Any) -> None:
    """Set ``target`` unless the config gives it another value, which is a problem that names both."""
    places = translation.places
    above = translation.get(target[:-1]) if len(target) > 1 else translation.tree
    if above is not None and not isinstance(above, dict):
        return  # its section is no object, which is told of it
    other = translation.get(target)
    if other == wanted and translation.has(target):
        return
    argument = places.override(path)
    is_ours = places.moved.get(target) == path and places.overrides.get(target) in (None, argument)
    if other not in (None, "auto") and not is_ours:
        line = places.of_value(target)[1]
        name = join_path(target) if target in places.overrides else translation.written(target)
        same = f"{name} is {show(other, 30)}" + (f" on line {line}" if line else "")
        translation.problem(
            path,
            f"is {show(written)}, which is {join_path(target)} {show(wanted)}, and {same}",
            "conflict",
            found=written,
            repair="keep one of them",
        )
        return
    translation.put(target, wanted, path)
    if argument is not None:
        places.overrides[target] = argument
