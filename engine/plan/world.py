"""The mesh degrees: which ranks work on the same samples, and how the others replicate and shard.

dp = world / (pp x cp x sp x tp), from `pipeline.stages`, `parallel.context_parallel`, `sequence_parallel_size` and
`tensor_parallel.size`; dp = dp_replicate x dp_shard, from the stage and `zero_optimization.mics_shard_size` (and hpZ).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.plan.findings import divisors, plural
from engine.plan.placement import resolve_placement
from engine.plan.plan import Degrees, World

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

MICS = "zero_optimization.mics_shard_size"
HPZ = "zero_optimization.zero_hpz_partition_size"
DATA_PARALLEL = "data_parallel_size"
MODEL_AXES = {
    "pp": "pipeline.stages",
    "cp": "parallel.context_parallel",
    "sp": "sequence_parallel_size",
    "tp": "tensor_parallel.size",
}
"""Axis -> the key that gives its degree, outermost first."""


def describe_world(world: World) -> str:
    """``world size 2 (torchrun variables)``: the size and how it was found, as far as that is known."""
    return f"world size {world.size} ({world.how})" if world.how else f"world size {world.size}"


def imagined_world(config: Config, size: int, how: str) -> World:
    """A world to plan for without asking torch what is there: on the device that the config names, else on the CPU."""
    device = "cpu" if config.device == "auto" else config.device
    return World(size=size, local_size=size, device=device, device_count=0, how=how)


def model_degrees(config: Config) -> dict[str, int]:
    """The degrees that a config asks for on the axes whose ranks work on the same samples; 1 where it does not."""
    stages = config.pipeline.stages if config.pipeline is not None else 1
    return {
        "pp": max(stages, 1) if isinstance(stages, int) else 1,
        "cp": config.parallel.context_parallel,
        "sp": config.sequence_parallel_size,
        "tp": max(config.tensor_parallel.size, 1) if config.tensor_parallel is not None else 1,
    }


def resolve_degrees(config: Config, world: World, findings: Findings) -> Degrees:
    """Stage 0 replicates over the data-parallel ranks, stages 1 to 3 shard over them; MiCS shards in groups.

    Where the model's axes do not divide the world, which is a problem, dp is that of the largest world they fill.
    """
    model = model_degrees(config)
    degrees = Degrees(pp=model["pp"], cp=model["cp"], sp=model["sp"], tp=model["tp"])
    if world.split_by_caller > 1:
        degrees = replace(degrees, tp=world.split_by_caller, split_by_caller=True)
    group = degrees.model
    if world.size % group:
        _report_world(model, world, findings)
        return replace(degrees, dp_replicate=max(world.size // group, 1))
    dp = world.size // group
    for axis, path in MODEL_AXES.items():
        if model[axis] > 1:
            findings.resolved(path, model[axis])
    _check_data_parallel_size(config, model, dp, world, findings)
    degrees = replace(degrees, placement=resolve_placement(config, world, degrees, dp, findings))
    shard = _mics_group(config, world, findings, dp)
    if config.zero_optimization.stage == 0:
        return replace(degrees, dp_replicate=dp)
    return replace(degrees, dp_replicate=dp // shard, dp_shard=shard)


def _report_world(model: dict[str, int], world: World, findings: Findings) -> None:
    """The degrees with their sources, the worlds next to this one that they fill, and for each degree those that fit
    beside the others."""
    asked = {axis: degree for axis, degree in model.items() if degree > 1}
    group = math.prod(asked.values())
    product = " x ".join(
        f"{MODEL_AXES[axis]} {degree} ({findings.source(MODEL_AXES[axis])})" for axis, degree in asked.items()
    )
    product += f" = {group}" if len(asked) > 1 else ""
    below = world.size // group * group
    worlds = " or ".join(str(size) for size in (below, below + group) if size)
    repairs = []
    for axis, degree in asked.items():
        others = group // degree
        if world.size % others == 0:
            fits = _nearest(degree, divisors(world.size // others))
            repairs.append(f"{MODEL_AXES[axis]} to {' or '.join(map(str, fits))}")
    axis = list(asked)[-1]
    findings.problem(
        MODEL_AXES[axis],
        f"{product} does not divide the ranks of {describe_world(world)}{_remainder(world.size, group)}"
        if world.size > group
        else f"{product} ranks are needed for one copy of the model, more than there are in {describe_world(world)}",
        found=asked[axis],
        allowed=f"a world of {worlds} ranks, or a multiple of {group}",
        repair=f"start {worlds} ranks" + (f", or set {', or '.join(repairs)}" if repairs else ""),
        code="ranks",
    )


def _nearest(wanted: int, fitting: list[int]) -> list[int]:
    """The largest that is not above ``wanted`` and the smallest above it, of ascending numbers."""
    below = [number for number in fitting if number <= wanted]
    return below[-1:] + fitting[len(below) : len(below) + 1]


def _check_data_parallel_size(config: Config, model: dict[str, int], dp: int, world: World, findings: Findings) -> None:
    """DeepSpeed makes a mesh of ``data_parallel_size`` x ``sequence_parallel_size`` where both are given, and does not
    read it alone."""
    size = config.data_parallel_size
    if size in (None, dp):
        return
    product = " x ".join(str(degree) for degree in model.values() if degree > 1)
    arithmetic = f"{world.size} / ({product}) = {dp}" if product else f"{dp}"
    if not findings.is_given(MODEL_AXES["sp"]):
        findings.note(DATA_PARALLEL, f"has no effect: {describe_world(world)} has {arithmetic} data-parallel ranks")
        return
    findings.problem(
        DATA_PARALLEL,
        f"{describe_world(world)} leaves {arithmetic} data-parallel ranks",
        found=size,
        allowed=str(dp),
        repair=f"remove the key, or start {size * math.prod(model.values())} ranks",
        code="ranks",
    )


def _mics_group(config: Config, world: World, findings: Findings, dp: int) -> int:
    """Ranks per shard group: ``mics_shard_size`` where it is set and fits, else all ``dp`` ranks."""
    zero = config.zero_optimization
    size = zero.mics_shard_size
    if size <= 0:
        return dp
    if zero.stage != 3:
        findings.problem(
            MICS,
            f"parameters in shards of {size} ranks need stage 3; "
            f"zero_optimization.stage is {zero.stage} ({findings.source('zero_optimization.stage')}), where DeepSpeed "
            "ignores it",
            found=size,
            allowed="-1 below stage 3",
            repair="set zero_optimization.stage to 3 or remove mics_shard_size",
        )
        return dp
    if dp % size:
        findings.problem(
            MICS,
            f"{size} does not divide the {plural(dp, 'data-parallel rank')} of "
            f"{describe_world(world)}{_remainder(dp, size)}",
            code="ranks",
            found=size,
            allowed=", ".join(map(str, divisors(dp))),
            repair="choose one of the divisors or change the number of ranks",
        )
        return dp
    return findings.resolved(MICS, size, f"{plural(dp // size, 'replica')} of a model sharded over {size}")


def resolve_reshard(config: Config, degrees: Degrees, findings: Findings) -> bool | int:
    """Stage 3: what a block does after its forward. True: sharded over all; an int: over that many ranks (hpZ)."""
    zero = config.zero_optimization
    size = zero.zero_hpz_partition_size
    if size <= 1:
        return zero.stage == 3
    if zero.stage != 3:
        findings.problem(
            HPZ,
            f"a second copy of sharded parameters over {size} ranks needs stage 3; "
            f"zero_optimization.stage is {zero.stage} ({findings.source('zero_optimization.stage')}), where DeepSpeed "
            "ignores it",
            found=size,
            allowed="1 below stage 3",
            repair="set zero_optimization.stage to 3 or remove zero_hpz_partition_size",
        )
        return False
    shard = degrees.dp_shard * degrees.slices
    if shard % size:
        findings.problem(
            HPZ,
            f"{size} does not divide the {plural(shard, 'rank')} a parameter is sharded over{_remainder(shard, size)}",
            code="ranks",
            found=size,
            allowed=", ".join(map(str, divisors(shard))),
            repair="choose one of the divisors or change the number of ranks",
        )
        return True
    if size == shard:
        findings.note(HPZ, f"{size} is the whole shard group: the same as plain stage 3")
        return True
    return findings.resolved(HPZ, size, f"a second copy is kept in groups of {size} ranks between forward and backward")


def _remainder(ranks: int, size: int) -> str:
    return f": {ranks} = {ranks // size} x {size} + {ranks % size}" if ranks > size else ""
