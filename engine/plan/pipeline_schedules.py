"""What is known of pipeline schedules without running them: who holds which stage, how long ranks idle, what they keep.

The orders of actions themselves are torch's (engine/model/pipeline/orders.py).
"""

from __future__ import annotations

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")
"""Stage s and stage 2 p - 1 - s stand on one rank."""
SPLITS_BACKWARD = ("zero_bubble", "zbv", "dualpipev")
"""Gradients of inputs are computed first, those of weights fill what would be idle."""


def bubble_fraction(schedule: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> float:
    """The idle part of a rank's step where all stages take equally long and the wire nothing.

    GPipe and 1F1B: (p-1)/(m+p-1); interleaved: (p-1)/(vm+p-1) (Narayanan et al., arXiv 2104.04473, 2.2). Schedules that
    split the backward, where its halves and a forward take equally long: (p-1)/(3vm+p-1), a third of that (Qi et al.,
    arXiv 2401.10241, ZB-H1). Exact where p divides m, and m >= 2p for the V-shaped ones; else ranks idle longer.
    """
    parts = 3 if schedule in SPLITS_BACKWARD else 1
    idle, chunks = num_ranks - 1, 1 if schedule in ("gpipe", "1f1b") else virtual_stages
    return idle / (parts * chunks * num_micro_batches + idle)


def activations_held(
    schedule: str, num_ranks: int, num_micro_batches: int, rank: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """The most micro-batches whose activations a rank holds at once, for each of its parts; their sum is the peak.

    GPipe: m. 1F1B: min(p-i, m) on rank i. Interleaved: 2(p-i-1) + (v-1)p + 1 passages through single parts, in rounds
    of p (Narayanan et al., 2.2). Split backwards keep them until the gradients of the weights: p for each part, and one
    more in all for dualpipev. Exact where p divides m, and m >= 2p for the V-shaped ones; else at most so many.
    """
    p, m = num_ranks, num_micro_batches
    if schedule == "gpipe":
        return (m,)
    if schedule == "1f1b":
        return (min(p - rank, m),)
    if schedule == "dualpipev":
        return min(p + 1, m), min(p, m)
    if schedule != "interleaved_1f1b":
        return (min(p, m),) * virtual_stages
    rounds, left = divmod(min(2 * (p - rank - 1) + (virtual_stages - 1) * p + 1, virtual_stages * m), p)
    whole, begun = divmod(rounds, virtual_stages)
    held = [whole * p + p * (part < begun) + left * (part == begun) for part in range(virtual_stages)]
    return tuple(held)


def rank_of_stage(schedule: str, num_ranks: int, stage: int) -> int:
    """The pipeline rank that holds a stage (of p x virtual ones)."""
    if schedule in V_SHAPED and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


def stages_of_rank(schedule: str, num_ranks: int, virtual_stages: int, rank: int) -> list[int]:
    stages = range(num_ranks * virtual_stages)
    return [stage for stage in stages if rank_of_stage(schedule, num_ranks, stage) == rank]
