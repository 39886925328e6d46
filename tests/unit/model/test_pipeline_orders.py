"""The orders of torch's schedules: complete, runnable by ranks that meet their transfers in one order, and as idle as
the formulas say."""

from __future__ import annotations

import itertools

import pytest

from engine.model.pipeline.orders import Action, idle_fraction, most_held, orders, timeline, with_transfers
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


SUITED = [(schedule, virtual, p, m) for (schedule, virtual), p, m in itertools.product(VIRTUAL, (2, 3, 4), (8, 12, 24))
          if m % p == 0]  # fmt: skip


@pytest.mark.parametrize(("schedule", "virtual", "ranks", "micro_batches"), [*SUITED, ("1f1b", 1, 4, 2)])
def test_idle_time_and_activations_are_the_formulas(schedule, virtual, ranks, micro_batches):
    idle = idle_fraction(timeline(schedule, ranks, virtual, micro_batches))
    assert idle == pytest.approx(bubble_fraction(schedule, ranks, micro_batches, virtual))
    most = [most_held(order) for order in orders(schedule, ranks, virtual, micro_batches)]
    assert most == [sum(activations_held(schedule, ranks, micro_batches, rank, virtual)) for rank in range(ranks)]


@pytest.mark.parametrize(("schedule", "virtual", "ranks", "micro_batches"), CELLS)
def test_for_other_numbers_the_formulas_are_bounds(schedule, virtual, ranks, micro_batches):
    idle = idle_fraction(timeline(schedule, ranks, virtual, micro_batches))
    assert idle >= bubble_fraction(schedule, ranks, micro_batches, virtual) - 1e-9
    for rank, order in enumerate(orders(schedule, ranks, virtual, micro_batches)):
        assert most_held(order) <= sum(activations_held(schedule, ranks, micro_batches, rank, virtual))


def test_a_rank_idles_and_keeps_what_one_can_count_by_hand():
    """Two stages, two micro-batches, 1F1B: F0 F1 . . B0 B0 . B1 B1 of 9, and F0 B0 B0 F1 B1 B1 in the middle of it."""
    first, second = timeline("1f1b", 2, 1, 2)
    assert [(str(s.action), s.start, s.end) for s in first] == [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 6), ("B1", 7, 9)]
    assert [(str(s.action), s.start, s.end) for s in second] == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5), ("B1", 5, 7)]
    assert idle_fraction((first, second)) == pytest.approx(1 / 3)
    assert [most_held(order) for order in orders("1f1b", 2, 1, 2)] == [2, 1]
