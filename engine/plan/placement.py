"""Where each rank stands: the order of the mesh axes, coordinates, groups, and which groups leave a node.

`parallel.placement` is read left to right, outermost axis first: ranks that differ in the last letter only are
neighbours. P is ``pp``, T is ``tp``, D is ``dp_replicate, dp_shard, cp, sp``: all whose tokens differ and whose
gradients are added, the ranks of one sequence next to each other, then those that share one copy of the sharded state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings
    from engine.plan.plan import Degrees, World

PLACEMENT = "parallel.placement"
AXES_OF: dict[str, tuple[str, ...]] = {"P": ("pp",), "D": ("dp_replicate", "dp_shard", "cp", "sp"), "T": ("tp",)}
"""Letter -> its axes, outermost first."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The axes in the default order, P, D, T."""

MAX_LISTED = 16
"""Ranks of which the plan lists every one; of more it shows the first and the last."""


def axes_in_order(placement: str) -> tuple[str, ...]:
    """All axes, outermost first: ``"DPT"`` -> ``dp_replicate, dp_shard, pp, cp, sp, tp``."""
    return tuple(axis for letter in placement for axis in AXES_OF[letter])


def coordinates(rank: int, degrees: Mapping[str, int], order: Sequence[str] = AXES) -> dict[str, int]:
    """Row-major coordinates of a rank on axes of these degrees, ``order`` being outermost first."""
    place: dict[str, int] = {}
    for axis in reversed(order):
        rank, place[axis] = divmod(rank, degrees[axis])
    return {axis: place[axis] for axis in order}


def groups(degrees: Mapping[str, int], axes: Sequence[str], order: Sequence[str] = AXES) -> list[tuple[int, ...]]:
    """The groups of ranks that differ in ``axes`` only, by their first rank; ascending ranks in each."""
    strides = {axis: math.prod(degrees[inner] for inner in order[at + 1 :]) for at, axis in enumerate(order)}
    others = [axis for axis in order if axis not in axes]
    inside = sorted(_sums(degrees, strides, axes))
    return [tuple(first + offset for offset in inside) for first in sorted(_sums(degrees, strides, others))]


def _sums(degrees: Mapping[str, int], strides: Mapping[str, int], axes: Sequence[str]) -> Iterator[int]:
    for place in product(*(range(degrees[axis]) for axis in axes)):
        yield sum(index * strides[axis] for index, axis in zip(place, axes, strict=True))


def crossings(degrees: Degrees, local_size: int) -> dict[str, tuple[int, int]]:
    """Axis of degree above 1 -> how many of its groups have ranks on two nodes or more, of how many."""
    sizes, order = degrees.by_axis, axes_in_order(degrees.placement)
    counts = {}
    for axis in order:
        if sizes[axis] > 1:
            found = groups(sizes, [axis], order)
            counts[axis] = (sum(len({rank // local_size for rank in group}) > 1 for group in found), len(found))
    return counts


def describe_places(degrees: Degrees) -> str:
    """``rank -> (dp_shard, tp): 0 -> 0 0, 1 -> 0 1, ...``; '' where fewer than two axes are above 1."""
    sizes, order = degrees.by_axis, axes_in_order(degrees.placement)
    used = [axis for axis in order if sizes[axis] > 1]
    if len(used) < 2:
        return ""

    def place(rank: int) -> str:
        at = coordinates(rank, sizes, order)
        return f"{rank} -> {' '.join(str(at[axis]) for axis in used)}"

    ranks: Sequence[int] = range(degrees.size)
    if degrees.size <= MAX_LISTED:
        listed = ", ".join(map(place, ranks))
    else:
        listed = f"{', '.join(map(place, ranks[: MAX_LISTED // 2]))}, ..., {place(ranks[-1])}"
    return f"rank -> {', '.join(used)}: {listed}"


def describe_crossings(degrees: Degrees, world: World) -> str:
    """Which groups cross nodes: ``between nodes: 8 of 8 dp_shard groups; within: pp, tp``; '' on one node."""
    if world.local_size >= world.size:
        return ""
    counts = crossings(degrees, world.local_size)
    between = [f"{across} of {total} {axis} groups" for axis, (across, total) in counts.items() if across]
    within = [axis for axis, (across, _) in counts.items() if not across]
    parts = [f"between nodes: {', '.join(between)}"] if between else []
    parts += [f"within a node: {', '.join(within)}"] if within else []
    return "; ".join(parts)


def resolve_placement(config: Config, world: World, degrees: Degrees, dp: int, findings: Findings) -> str:
    """The order of the axes: the caller's where it has split the model; a note where the key changes nothing."""
    placement, given = config.parallel.placement, findings.is_given(PLACEMENT)
    if world.placement_of_caller:
        if given:
            findings.note(PLACEMENT, "has no effect: mpu's groups say where ranks stand")
        return world.placement_of_caller
    sizes = {"P": degrees.pp, "D": dp * degrees.cp * degrees.sp, "T": degrees.tp}
    used = [letter for letter in placement if sizes[letter] > 1]
    if given and len(used) < 2:
        axes = f"only {used[0]} has a degree above 1" if used else "there is one rank"
        findings.note(PLACEMENT, f"has no effect: {axes}")
    return findings.resolved(PLACEMENT, placement, "outermost first; neighbours differ in the last letter")
