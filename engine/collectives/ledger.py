"""The byte ledger: how much every collective of the engine puts on the wire, by mesh axis and operation.

"Sent" is what one rank sends under the ring or pairwise model: an all-reduce of B bytes over N ranks sends
2 (N-1)/N B, a reduce-scatter, an all-gather and an all-to-all (N-1)/N B each; a broadcast sends (N-1) B from its
root and nothing from the others. Headers of the network and what a backend says to arrange a transfer are not in it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

STEPS = "steps"


@dataclass(slots=True)
class Sent:
    """Bytes, and the calls of collectives (or single sends) that took them."""

    bytes: int = 0
    calls: int = 0

    def add(self, sent_bytes: int, calls: int = 1) -> None:
        self.bytes += sent_bytes
        self.calls += calls


class Account:
    """Counts bytes that are sent for one purpose. See `Ledger.account`."""

    def __init__(self, purpose: str, booked: dict[tuple[str, str, str], Sent]) -> None:
        self._purpose, self._booked = purpose, booked

    def add(self, axis: str, operation: str, sent_bytes: int) -> None:
        self._booked[self._purpose, axis, operation].add(sent_bytes)


class Ledger:
    """Counts bytes sent by this rank and books them: each optimizer step `take`s what came together since the last;
    what is sent for another purpose (``start``, ``evaluation``, ``checkpoint``) is kept apart."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], Sent] = defaultdict(Sent)
        self._booked: dict[tuple[str, str, str], Sent] = defaultdict(Sent)

    def add(self, axis: str, operation: str, sent_bytes: int) -> None:
        self._pending[axis, operation].add(sent_bytes)

    def take(self) -> dict[str, int]:
        """Bytes sent since the last call, by axis. They belong to a step."""
        by_axis: dict[str, int] = defaultdict(int)
        for (axis, _), sent in self._pending.items():
            by_axis[axis] += sent.bytes
        self.book(STEPS)
        return dict(by_axis)

    def book(self, purpose: str) -> None:
        """What came together since the last call was sent for ``purpose``."""
        for (axis, operation), sent in self._pending.items():
            self._booked[purpose, axis, operation].add(sent.bytes, sent.calls)
        self._pending.clear()

    @contextlib.contextmanager
    def apart(self, purpose: str) -> Iterator[None]:
        """What is sent inside is for ``purpose`` and not part of the step that may be under way."""
        step, self._pending = self._pending, defaultdict(Sent)
        try:
            yield
        finally:
            self.book(purpose)
            self._pending = step

    def account(self, purpose: str) -> Account:
        """What is added to it is booked for ``purpose`` at once, whatever is under way: for other threads, too."""
        return Account(purpose, self._booked)

    def totals(self) -> dict[str, int]:
        """Bytes sent since the start, by purpose; a step under way is not in them yet."""
        by_purpose: dict[str, int] = defaultdict(int)
        for (purpose, _, _), sent in self._booked.items():
            by_purpose[purpose] += sent.bytes
        return dict(by_purpose)

    def operations(self, purpose: str = STEPS) -> dict[tuple[str, str], int]:
        """Bytes sent for ``purpose`` since the start, by (axis, operation)."""
        return {key: sent.bytes for key, sent in self.sent(purpose).items()}

    def sent(self, purpose: str = STEPS) -> dict[tuple[str, str], Sent]:
        """Bytes and calls for ``purpose`` since the start, by (axis, operation)."""
        return {(axis, name): copy(sent) for (booked, axis, name), sent in self._booked.items() if booked == purpose}
