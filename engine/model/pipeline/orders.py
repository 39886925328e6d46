"""In which order a rank computes, sends and receives: the schedules of torch.distributed.pipelining.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html. Only their orders are used; who runs them is
schedule_runner.py (docs/adr/0017-pipeline-runner.md says why).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.plan.pipeline_schedules import V_SHAPED, rank_of_stage
from engine.torch_compat import pipeline_orders

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


@dataclass(frozen=True)
class Action:
    """``F``orward, ``B``ackward, or its halves: of the ``I``nputs, of the ``W``eights; SEND and RECV of what travels to
    the next stage (F) or back (B)."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@functools.lru_cache
def orders(
    schedule: str, num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> tuple[tuple[Action | None, ...], ...]:
    """For every pipeline rank its computations in order; None is a slot in which it waits, where torch says so.

    torch's schedules want at least as many micro-batches as ranks (stages for dualpipev), the interleaved ones a
    multiple. They are made for the next number that suits; what is too many is left out.
    """
    least = num_ranks * (2 if schedule in V_SHAPED else 1)
    suits = max(least, -(-num_micro_batches // num_ranks) * num_ranks)
    made = pipeline_orders(schedule, num_ranks, virtual_stages, suits)
    return tuple(
        tuple(
            None if entry is None else Action(*entry)  # type: ignore[arg-type]
            for entry in made[rank]
            if entry is None or entry[2] < num_micro_batches
        )
        for rank in range(num_ranks)
    )


@functools.lru_cache
def with_transfers(
    schedule: str, num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """`orders` with sends and receives in their places.

    A send stands right behind what it sends. The receive of it stands in the other rank's order at the point that rank
    has come to then, in a run in which all ranks take turns: so of any two ranks both meet their transfers in one
    order, and none waits for another that waits for it.

    Raises ValueError for an order that cannot be run.
    """
    num_stages = num_ranks * virtual_stages
    waiting = [_merged(order) for order in orders(schedule, num_ranks, virtual_stages, num_micro_batches)]
    placed: list[list[Action]] = [[] for _ in waiting]
    done: set[tuple[str, int, int]] = set()
    arrived: set[tuple[str, int, int]] = set()

    def needs(action: Action) -> tuple[str, int, int] | None:
        if action.kind == "F" and action.stage > 0:
            return "F", action.stage - 1, action.micro_batch
        if action.kind in "BI" and action.stage < num_stages - 1:
            return "B", action.stage + 1, action.micro_batch
        return None

    while any(waiting):
        moved = False
        for rank, queue in enumerate(waiting):
            if not queue:
                continue
            need = needs(queue[0])
            if need is not None and need not in (done if _is_here(schedule, num_ranks, need[1], rank) else arrived):
                continue
            action = queue.pop(0)
            moved = True
            placed[rank].append(action)
            if action.kind == "W":
                continue
            way = "F" if action.kind == "F" else "B"
            done.add((way, action.stage, action.micro_batch))
            neighbour = action.stage + (1 if way == "F" else -1)
            if not 0 <= neighbour < num_stages or _is_here(schedule, num_ranks, neighbour, rank):
                continue
            placed[rank].append(Action(f"SEND_{way}", action.stage, action.micro_batch))  # type: ignore[arg-type]
            peer = rank_of_stage(schedule, num_ranks, neighbour)
            placed[peer].append(Action(f"RECV_{way}", neighbour, action.micro_batch))  # type: ignore[arg-type]
            arrived.add((way, action.stage, action.micro_batch))
        if not moved:
            raise ValueError(f"{schedule}: no rank can go on: {[queue[:1] for queue in waiting]}")
    return tuple(tuple(order) for order in placed)


def _merged(order: Sequence[Action | None]) -> list[Action]:
    """Both halves of a backward right after each other are one whole one, which costs less."""
    merged: list[Action] = []
    for action in filter(None, order):
        if action.kind == "W" and merged and merged[-1] == Action("I", action.stage, action.micro_batch):
            merged[-1] = Action("B", action.stage, action.micro_batch)
        else:
            merged.append(action)
    return merged


def _is_here(schedule: str, num_ranks: int, stage: int, rank: int) -> bool:
    return rank_of_stage(schedule, num_ranks, stage) == rank


@dataclass(frozen=True)
class Slot:
    """An action in `timeline`, from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


def one_forward(action: Action) -> float:
    """How long actions take where stages are alike, in forwards: a backward 2, each half of it 1."""
    return 2 if action.kind == "B" else 1


def timeline(
    schedule: str,
    num_ranks: int,
    virtual_stages: int,
    num_micro_batches: int,
    duration: Callable[[Action], float] = one_forward,
) -> tuple[tuple[Slot, ...], ...]:
    """When each rank computes what, if transfers take no time."""
    last = num_ranks * virtual_stages - 1
    waiting = [[a for a in order if a] for order in orders(schedule, num_ranks, virtual_stages, num_micro_batches)]
    ended: dict[tuple[str, int, int], float] = {}
    slots: list[list[Slot]] = [[] for _ in waiting]
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue:
                action = queue[0]
                way, behind = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
                need = (way, behind, action.micro_batch)
                if action.kind != "W" and 0 <= behind <= last and need not in ended:
                    break
                queue.pop(0)
                free = slots[rank][-1].end if slots[rank] else 0
                start = free if action.kind == "W" else max(free, ended.get(need, 0))
                slots[rank].append(Slot(action, start, start + duration(action)))
                if action.kind != "W":
                    ended["F" if action.kind == "F" else "B", action.stage, action.micro_batch] = slots[rank][-1].end
    return tuple(map(tuple, slots))


def idle_fraction(slots: Sequence[Sequence[Slot]]) -> float:
    """The part of the ranks' time, until the last ends, in which they wait."""
    busy = sum(slot.end - slot.start for row in slots for slot in row)
    end = max(row[-1].end for row in slots)
    return 1 - busy / (end * len(slots)) if end else 0.0


def most_held(order: Sequence[Action | None]) -> int:
    """The most micro-batches whose activations a rank keeps at once, counted in each of its stages.

    They are kept from the forward to the backward, or to the half that computes the gradients of weights.
    """
    held = most = 0
    for action in _merged(order):
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
