"""What is known of pipeline schedules without running them: who holds which stage, how long ranks idle, what they keep.

The orders of actions themselves are torch's (engine/model/pipeline/orders.py).
"""

from __future__ import annotations

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")
"""Stage s and stage 2 p - 1 - s stand on one rank."""
SPLITS_BACKWARD = ("zero_bubble", "zbv", "dualpipev")
"""Gradients of inputs are computed first, those of weights fill what would be idle."""


def bubble_fraction(schedule: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> float | None:
    """The idle part of a rank's step where all stages take equally long and the wire nothing.

    GPipe and 1F1B: (p-1)/(m+p-1); interleaved: (p-1)/(vm+p-1) (Narayanan et al., arXiv 2104.04473, 2.2). None for
    schedules whose bubble depends on how long the two halves of a backward take (Qi et al., arXiv 2401.10241).
    """
    if schedule in SPLITS_BACKWARD:
        return None
    idle, chunks = num_ranks - 1, virtual_stages if schedule == "interleaved_1f1b" else 1
    return idle / (chunks * num_micro_batches + idle)


def activations_held(schedule: str, num_ranks: int, num_micro_batches: int, rank: int) -> int | None:
    """The most micro-batches whose activations a rank holds at once, for schedules of one part a rank."""
    if schedule == "gpipe":
        return num_micro_batches
    return min(num_ranks - rank, num_micro_batches) if schedule == "1f1b" else None


def rank_of_stage(schedule: str, num_ranks: int, stage: int) -> int:
    """The pipeline rank that holds a stage (of p x virtual ones)."""
    if schedule in V_SHAPED and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


def stages_of_rank(schedule: str, num_ranks: int, virtual_stages: int, rank: int) -> list[int]:
    stages = range(num_ranks * virtual_stages)
    return [stage for stage in stages if rank_of_stage(schedule, num_ranks, stage) == rank]
