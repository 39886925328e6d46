"""The verdict on ranks that wait: only a proof counts."""

from __future__ import annotations

import threading
from typing import Any

from engine.collectives.stall import stalled, watch

WORLD = 2


def at(name: str | None, number: int = 1, issued: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """A rank that waits for the ``number``-th collective ``name``, having come to those of ``issued``."""
    waiting = None if name is None else [name, number, [0, 1]]
    counts = {**(issued or {}), **({} if name is None else {name: number})}
    return {
        "waiting": waiting,
        "place": "step 1",
        "issued": counts,
        "completed": 4,
        "published": 1,
        "ended": False,
    } | more


def verdict(*ranks: dict[str, Any], before: tuple[dict[str, Any], ...] | None = None) -> str | None:
    now = {rank: {**position, "published": 2} for rank, position in enumerate(ranks)}
    return stalled(dict(enumerate(before or ranks)), now, WORLD)


def test_ranks_in_different_collectives_are_proven_to_be_stuck():
    message = verdict(at("gathering blocks.1"), at("gathering blocks.2"))
    assert message is not None
    assert "rank 0 (step 1) waits in gathering blocks.1 for rank 1" in message
    assert "rank 1 (step 1) waits in gathering blocks.2 for rank 0" in message
    assert "the same blocks" in message


def test_ranks_in_the_same_collective_are_only_slow():
    assert verdict(at("summing"), at("summing")) is None


def test_a_peer_that_has_come_and_gone_on_is_no_proof():
    """Rank 1 has sent its part of what rank 0 waits for; the network may be slow."""
    assert verdict(at("a"), at("b", issued={"a": 1})) is None
    assert verdict(at("a", number=2), at("b", issued={"a": 1})) is not None


def test_a_rank_outside_the_engine_may_still_come():
    assert verdict(at("a"), at(None)) is None


def test_a_rank_that_has_ended_will_not():
    message = verdict(at("a"), at(None, ended=True))
    assert message is not None
    assert "rank 1 has ended (step 1)" in message


def test_anything_that_has_moved_or_is_stale_is_no_proof():
    stuck = at("a"), at("b")
    assert verdict(*stuck, before=(at("a"), at("b", completed=3))) is None
    assert stalled(dict(enumerate(stuck)), dict(enumerate(stuck)), WORLD) is None  # nobody has published again
    assert stalled({0: stuck[0]}, dict(enumerate(stuck)), WORLD) is None


def watched_and_not() -> tuple[list[str], list[str]]:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "stall-watch" and thread.is_alive()]

    watch.stop()
    watch.start()
    during = threads()
    watch.stop()
    return during, threads()


def test_no_thread_outlives_the_watch(ranks):
    """The interpreter's end aborts a process whose thread is inside a call of the store."""
    assert ranks(2).run(watched_and_not) == [(["stall-watch"], [])] * 2
