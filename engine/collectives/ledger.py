"""The byte ledger: how much every collective of the engine puts on the wire, by mesh axis and operation.

"Sent" is what one rank sends under the ring or pairwise model: an all-reduce of B bytes over N ranks sends
2 (N-1)/N B, a reduce-scatter, an all-gather and an all-to-all (N-1)/N B each.
"""

from __future__ import annotations

from collections import defaultdict


class Ledger:
    """Counts bytes sent by this rank. `take` returns what came together since the last call."""

    def __init__(self) -> None:
        self._sent_bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.total_bytes = 0

    def add(self, axis: str, operation: str, sent_bytes: int) -> None:
        self._sent_bytes[axis, operation] += sent_bytes
        self.total_bytes += sent_bytes

    def take(self) -> dict[str, int]:
        """Bytes sent since the last call, by axis."""
        by_axis: dict[str, int] = defaultdict(int)
        for (axis, _), sent_bytes in self._sent_bytes.items():
            by_axis[axis] += sent_bytes
        self._sent_bytes.clear()
        return dict(by_axis)
