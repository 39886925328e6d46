"""How many ranks a config is written for, where nobody says: the fewest for which its sizes fit together."""

from __future__ import annotations

from math import lcm, prod
from typing import TYPE_CHECKING

from engine.plan.batch import ACCUMULATION, MICRO, TOTAL, resolve_batch
from engine.plan.findings import Findings
from engine.plan.world import imagined_world, model_degrees, resolve_degrees
from engine.plan.zero import resolve_zero

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.plan import World

LARGEST_WORLD = 2**20
"""More ranks than this are not tried."""


def fitting_world(config: Config) -> World:
    """One rank where the sizes fit one or fit no number that follows from them."""
    sizes = [size for size in sorted(_candidates(config)) if size <= LARGEST_WORLD]
    worlds = (imagined_world(config, size, "the fewest that its sizes fit") for size in sizes)
    return next((world for world in worlds if _fits(config, world)), imagined_world(config, 1, ""))


def _candidates(config: Config) -> set[int]:
    """One rank; the ranks of one group of each kind; those that the three batch sizes imply; products of these."""
    zero = config.zero_optimization
    shards = lcm(max(zero.mics_shard_size, 1), max(zero.zero_hpz_partition_size, 1))
    model = prod(model_degrees(config).values())
    total, micro, accumulation = (getattr(config, key) or 0 for key in (TOTAL, MICRO, ACCUMULATION))
    per_rank = micro * accumulation
    implied = total // per_rank if total and per_rank and total % per_rank == 0 else 1
    ranks = {1, shards, implied, lcm(shards, implied)}
    if config.data_parallel_size:
        ranks |= {config.data_parallel_size}
    return ranks | {size * model for size in ranks}


def _fits(config: Config, world: World) -> bool:
    findings = Findings(config)
    degrees = resolve_degrees(config, world, findings)
    resolve_batch(config, world, degrees, findings)
    resolve_zero(config, degrees, findings)
    return not findings.problems
