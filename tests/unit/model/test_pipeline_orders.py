"""The orders of torch's schedules: complete, runnable by ranks that meet their transfers in one order, and as idle as
the formulas say."""

from __future__ import annotations

import itertools

import pytest

from engine.model.pipeline.orders import Action, orders, with_transfers
from engine.plan.pipeline_schedules import activations_held, bubble_fraction, rank_of_stage, stages_of_rank

VIRTUAL = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zero_bubble", 1), ("zero_bubble", 2),
    ("zbv", 2), ("dualpipev", 2),
]  # fmt: skip
CELLS = [
    (schedule, virtual, ranks, micro_batches)
    for (schedule, virtual), ranks, micro_batches in itertools.product(VIRTUAL, (2, 3, 4), (1, 2, 3, 5, 8))
]


@pytest.mark.parametrize(("schedule", "virtual", "ranks", "micro_batches"), CELLS)
def test_every_micro_batch_passes_every_stage_once(schedule, virtual, ranks, micro_batches):
    placed = with_transfers(schedule, ranks, virtual, micro_batches)
    last = ranks * virtual - 1
    for rank, order in enumerate(placed):
        assert len(set(order)) == len(order)
        done = set(order)
        for stage, index in itertools.product(stages_of_rank(schedule, ranks, virtual, rank), range(micro_batches)):
            assert Action("F", stage, index) in done
            whole, halves = Action("B", stage, index) in done, {Action("I", stage, index), Action("W", stage, index)}
            assert whole != (halves <= done)
            apart = stage < last and rank_of_stage(schedule, ranks, stage + 1) != rank
            assert (Action("SEND_F", stage, index) in done) == apart
            assert (Action("RECV_B", stage, index) in done) == apart


@pytest.mark.parametrize(("schedule", "virtual", "ranks", "micro_batches"), CELLS)
def test_two_ranks_meet_their_transfers_in_one_order(schedule, virtual, ranks, micro_batches):
    """So a backend without tags (NCCL runs what two ranks exchange in the order of the calls) cannot lock up either."""
    placed = with_transfers(schedule, ranks, virtual, micro_batches)

    def exchanged(rank: int, peer: int) -> list[tuple[str, int, int]]:
        found = []
        for action in placed[rank]:
            if "_" not in action.kind:
                continue
            way, sends = action.kind[-1], action.kind.startswith("SEND")
            step = 1 if way == "F" else -1
            sender = action.stage if sends else action.stage - step
            other = action.stage + step if sends else action.stage - step
            if rank_of_stage(schedule, ranks, other) == peer:
                found.append((way, sender, action.micro_batch))
        return found

    for one, other in itertools.combinations(range(ranks), 2):
        assert exchanged(one, other) == exchanged(other, one)


def simulate(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[float, list[int]]:
    """(idle part of the step, most micro-batches held by each rank): a forward takes 1, a backward 2, a wire nothing;
    with virtual stages all of it that part less."""
    waiting = [[a for a in order if a] for order in orders(schedule, ranks, virtual, micro_batches)]
    free, ended = [0.0] * ranks, {}
    held, most = [0] * ranks, [0] * ranks
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue:
                action = queue[0]
                neighbour = action.stage - 1 if action.kind == "F" else action.stage + 1
                need = (action.kind, neighbour, action.micro_batch)
                if 0 <= neighbour < ranks * virtual and need not in ended:
                    break
                queue.pop(0)
                start = max(free[rank], ended.get(need, 0.0))
                free[rank] = start + (1.0 if action.kind == "F" else 2.0) / virtual
                ended[action.kind, action.stage, action.micro_batch] = free[rank]
                held[rank] += 1 if action.kind == "F" else -1
                most[rank] = max(most[rank], held[rank])
    total = max(free)
    return 1 - 3.0 * micro_batches / total, most


@pytest.mark.parametrize(
    ("schedule", "virtual", "ranks", "micro_batches"),
    [("gpipe", 1, 4, 8), ("1f1b", 1, 4, 8), ("1f1b", 1, 3, 5), ("interleaved_1f1b", 2, 4, 8), ("1f1b", 1, 4, 2)],
)
def test_idle_time_and_activations_are_the_formulas(schedule, virtual, ranks, micro_batches):
    idle, most = simulate(schedule, ranks, virtual, micro_batches)
    assert idle == pytest.approx(bubble_fraction(schedule, ranks, micro_batches, virtual))
    if virtual == 1:
        assert most == [activations_held(schedule, ranks, micro_batches, rank) for rank in range(ranks)]
