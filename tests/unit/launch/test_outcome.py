"""Which rank's end counts, and what is printed of it."""

from __future__ import annotations

import signal

import pytest

from engine.launch.outcome import Outcome, judge

DIED = "rank 1 died (signal 11); go on from the last save with --resume auto"


@pytest.mark.parametrize(
    ("exit_codes", "messages", "expected"),
    [
        ({1: 0, 0: 0}, {}, Outcome(0)),
        ({1: 2, 0: 2}, {0: "bad key", 1: "bad key"}, Outcome(2, ("bad key",))),
        ({1: 1, 0: 1}, {0: "peer gone", 1: "NaN"}, Outcome(1, ("rank 1: NaN",))),
        ({1: 1, 0: 1}, {0: "NaN", 1: "NaN"}, Outcome(1, ("NaN",))),
        ({1: 1}, {1: "NaN"}, Outcome(1, ("rank 1: NaN",))),
        ({1: 2, 0: 2}, {0: "no file a", 1: "no file b"}, Outcome(2, ("rank 0: no file a", "rank 1: no file b"))),
        ({1: -11, 0: 1}, {0: "peer gone"}, Outcome(1, (DIED,))),
        ({1: 3}, {}, Outcome(3, ("rank 1 exited with code 3 and left no message",))),
        ({1: 143, 0: 143}, {}, Outcome(143)),
    ],
)
def test_the_first_failure_is_the_cause(
    exit_codes: dict[int, int], messages: dict[int, str], expected: Outcome
) -> None:
    assert judge(2, exit_codes, messages, None) == expected


def test_after_a_stop_request() -> None:
    assert judge(2, {0: 130, 1: 130}, {}, signal.SIGINT) == Outcome(130)
    assert judge(2, {0: 0, 1: 0}, {}, signal.SIGINT) == Outcome(0)
    assert judge(2, {0: 143, 1: 1}, {1: "disk full"}, signal.SIGTERM) == Outcome(1, ("rank 1: disk full",))
    assert judge(2, {0: -15, 1: -15}, {}, signal.SIGTERM) == Outcome(
        143, ("stopped by SIGTERM before training began; nothing was saved",)
    )
    assert judge(2, {0: 130, 1: 130}, {0: "early", 1: "early"}, signal.SIGINT) == Outcome(
        130, ("stopped by SIGINT before training began; nothing was saved",)
    )


def test_ranks_that_stopped_themselves_keep_their_code() -> None:
    """Somebody sent the signal to the ranks and not to the launcher."""
    assert judge(2, {0: 143, 1: 143}, {}, None) == Outcome(143)


def test_who_lost_a_peer_is_no_cause_even_if_it_ended_first() -> None:
    messages = {0: "the connection is lost", 1: "the cause"}
    assert judge(2, {0: 1, 1: 1}, messages, None, consequences={0}).lines == ("rank 1: the cause",)
    assert judge(2, {0: 1, 1: -9}, messages, None, consequences={0}).lines[0].startswith("rank 1 died (signal 9)")
    assert judge(2, {0: 1}, messages, None, consequences={0}).lines == ("rank 0: the connection is lost",)
