"""The mesh degrees: how many ranks replicate and how many shard (`zero_optimization.mics_shard_size`, hpZ)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.findings import divisors, plural
from engine.plan.plan import Degrees, World

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

MICS = "zero_optimization.mics_shard_size"
HPZ = "zero_optimization.zero_hpz_partition_size"


def describe_world(world: World) -> str:
    """``world size 2 (torchrun variables)``: the size and how it was found, as far as that is known."""
    return f"world size {world.size} ({world.how})" if world.how else f"world size {world.size}"


def imagined_world(config: Config, size: int, how: str) -> World:
    """A world to plan for without asking torch what is there: on the device that the config names, else on the CPU."""
    device = "cpu" if config.device == "auto" else config.device
    return World(size=size, local_size=size, device=device, device_count=0, how=how)


def resolve_degrees(config: Config, world: World, findings: Findings) -> Degrees:
    """Stage 0 replicates over all ranks, stages 1 to 3 shard over all; MiCS shards in groups of ranks."""
    stage = config.zero_optimization.stage
    shard = _mics_group(config, world, findings, world.size)
    if stage == 0:
        return Degrees(dp_replicate=world.size)
    return Degrees(dp_replicate=world.size // shard, dp_shard=shard)


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
    shard = degrees.dp_shard
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
