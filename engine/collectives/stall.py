"""Ranks that no longer do the same thing are named and ended, instead of waiting for each other for ever.

A rank that skips a block at stage 3, or takes one step more than the others, leaves its peers in a collective that
never completes. Every collective of the engine therefore has a name ("gathering blocks.1"), and a rank counts how often
it has come to each. While one of them takes longer than ``quiet_seconds``, a thread on every rank publishes its counts
in the store of the process group. The verdict is a proof, not a guess about slowness: *every* rank waits, and for each
there is a peer that has not come to the collective it waits for. Then nobody can go on, and every rank raises the same
RunFailed.

A rank that computes, loads data or waits in a collective of the user's own is not waiting here: its peers wait as long
as the process group's timeout says. A broken wait is possible on gloo; on other backends it is their own abort.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from engine.contracts import RunFailed
from engine.mesh import is_gloo_alone
from engine.torch_compat import store_of

_BREAK_TAG = (1 << 31) - 1
_PREFIX = "engine/stall"


@dataclass(frozen=True)
class Ticket:
    """The ``number``-th time that this rank came to the collective ``name``, which needs all of ``ranks``."""

    name: str
    number: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


class _Waiting:
    """While the block runs this rank waits for ``ticket``; an error of the transport becomes RunFailed."""

    def __init__(self, watch: StallWatch, ticket: Ticket) -> None:
        self._watch, self._ticket = watch, ticket

    def __enter__(self) -> Self:
        if self._watch.verdict is not None:
            raise RunFailed(self._watch.verdict)
        self._watch.waiting = (self._ticket, time.monotonic())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            message = self._watch.explain(self._ticket, error)
            self._watch.waiting = None
            raise RunFailed(message) from None
        self._watch.waiting = None
        self._watch.num_completed += 1


_JOIN_SECONDS = 5.0
"""More than a question to the store takes, unless the store itself hangs."""


class StallWatch:
    """This process's part. ``place`` is where training stands, in words; the engine keeps it true."""

    def __init__(self) -> None:
        self.quiet_seconds = 10.0
        self.interval_seconds = 1.0
        self.place = "before the first step"
        self.waiting: tuple[Ticket, float] | None = None
        self.num_completed = 0
        self.verdict: str | None = None
        self._issued: Counter[str] = Counter()
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._rank, self._size = 0, 1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_published = 0

    def start(self) -> None:
        """Watch the default process group from now on. A second engine on it changes nothing."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None and self._world is not None and self._world() is world:
            return
        self._end_thread()
        self._world, self._issued, self.verdict, self.waiting = None, Counter(), None, None
        self.num_completed = self._num_published = 0
        if world is None or dist.get_world_size() == 1:
            return
        self._world = weakref.ref(world)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._stop = threading.Event()
        store = dist.PrefixStore(_PREFIX, store_of(world))
        arguments = (self._stop, store, self._world)
        self._thread = threading.Thread(target=self._watch, args=arguments, daemon=True, name="stall-watch")
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer, and leave a word for peers that still wait."""
        self._end_thread()
        world = self._world() if self._world is not None else None
        self._world = None
        if world is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it everybody who could read
                self._publish(dist.PrefixStore(_PREFIX, store_of(world)), has_ended=True)

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A daemon thread that the interpreter's end meets inside a call of the store aborts the process
            # (https://github.com/python/cpython/issues/87135): "terminate called without an active exception".
            self._thread.join(_JOIN_SECONDS)

    # --- what collectives call -------------------------------------------------------------------------------

    def issue(self, name: str, ranks: Sequence[int], group: dist.ProcessGroup | None) -> Ticket:
        self._issued[name] += 1
        return Ticket(name, self._issued[name], tuple(ranks), group)

    def wait(self, ticket: Ticket) -> _Waiting:
        return _Waiting(self, ticket)

    def explain(self, ticket: Ticket, error: BaseException) -> str:
        """Why a wait broke: the verdict, or who is no longer there."""
        deadline = time.monotonic() + 3 * self.interval_seconds
        positions: dict[int, dict[str, Any]] = {}
        while self.verdict is None and time.monotonic() < deadline:
            try:
                store = dist.PrefixStore(_PREFIX, store_of(self._world() if self._world else None))
                self._publish(store)
                positions = self._read(store)
                if store.check(["verdict"]):
                    self.verdict = store.get("verdict").decode()
            except RuntimeError:
                break
            if any(position["ended"] for position in positions.values()):
                break
            time.sleep(self.interval_seconds / 5)
        if self.verdict is not None:
            return self.verdict
        others = [rank for rank in ticket.ranks if rank != self._rank]
        seen = "; ".join(_describe(rank, positions.get(rank)) for rank in others[:8])
        cause = str(error).strip().splitlines()[0][:200]
        return f"rank {self._rank} ({self.place}) waited in {ticket.name}, and the connection broke: {seen}. {cause}"

    # --- the thread ------------------------------------------------------------------------------------------

    def _watch(self, stop: threading.Event, store: dist.Store, world: weakref.ref[dist.ProcessGroup]) -> None:
        has_asked = False
        before: dict[int, dict[str, Any]] = {}
        while not stop.wait(self.interval_seconds):
            if not dist.is_initialized() or dist.group.WORLD is not world():
                return
            try:
                waiting = self.waiting
                is_quiet = waiting is not None and time.monotonic() - waiting[1] > self.quiet_seconds
                if is_quiet and not has_asked:
                    store.set("asked", "1")
                    has_asked = True
                elif has_asked and not is_quiet:
                    store.delete_key("asked")
                    has_asked = False
                if not is_quiet and not store.check(["asked"]):
                    continue
                self._publish(store)
                positions = self._read(store)
                message = stalled(before, positions, self._size)
                before = positions
                if message is not None:
                    store.compare_set("verdict", "", message)
                if store.check(["verdict"]):
                    self.verdict = store.get("verdict").decode()
                    self._break()
                    return
            except RuntimeError:
                return  # the store is gone: the wait breaks by itself

    def _publish(self, store: dist.Store, has_ended: bool = False) -> None:
        waiting = self.waiting
        self._num_published += 1
        position = {
            "waiting": None if waiting is None else [waiting[0].name, waiting[0].number, list(waiting[0].ranks)],
            "place": self.place,
            "issued": dict(self._issued),
            "completed": self.num_completed,
            "published": self._num_published,
            "ended": has_ended,
        }
        store.set(f"rank{self._rank}", json.dumps(position))

    def _read(self, store: dist.Store) -> dict[int, dict[str, Any]]:
        ranks = [rank for rank in range(self._size) if store.check([f"rank{rank}"])]
        return {rank: json.loads(store.get(f"rank{rank}")) for rank in ranks}

    def _break(self) -> None:
        """End this rank's wait from outside. gloo has no abort, but a receive that times out closes its group."""
        waiting = self.waiting
        if waiting is None:
            return
        ticket = waiting[0]
        group = ticket.group or dist.group.WORLD
        if not is_gloo_alone(group):
            group.abort()  # type: ignore[union-attr]
            return
        peer = next(rank for rank in ticket.ranks if rank != self._rank)
        with contextlib.suppress(RuntimeError):  # which is what closes the group
            work = dist.irecv(torch.zeros(1), peer, group=ticket.group, tag=_BREAK_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def stalled(before: Mapping[int, Any], now: Mapping[int, Any], world_size: int) -> str | None:
    """The verdict if the ranks' positions prove that none can go on, else None.

    Both readings must be of the same standstill: each rank has published again, and nothing has moved.
    """
    if len(before) < world_size or len(now) < world_size:
        return None
    lines, names = [], set()
    for rank in sorted(now):
        then, position = dict(before[rank]), dict(now[rank])
        fresh = then.pop("published") != position.pop("published") or position["ended"]
        if then != position or not fresh:
            return None
        if position["ended"]:
            lines.append(_describe(rank, position))
            continue
        if position["waiting"] is None:
            return None
        name, number, ranks = position["waiting"]
        late = [peer for peer in ranks if now[peer]["issued"].get(name, 0) < number]
        if not late:
            return None
        names.add(name)
        lines.append(f"{_describe(rank, position)} for rank {', '.join(map(str, late))}")
    hint = "every rank must run the same forwards, backwards and steps"
    if any(name.startswith("gathering") for name in names):
        hint += "; at ZeRO stage 3 also the same blocks (a stage below 3 has no such rule)"
    return f"the ranks wait for each other and none can go on: {'; '.join(lines)}: {hint}"


def _describe(rank: int, position: Mapping[str, Any] | None) -> str:
    if position is None:
        return f"rank {rank} left no word (was it killed?)"
    if position["ended"]:
        return f"rank {rank} has ended ({position['place']})"
    if position["waiting"] is None:
        return f"rank {rank} ({position['place']}) is outside the engine"
    return f"rank {rank} ({position['place']}) waits in {position['waiting'][0]}"


watch = StallWatch()
"""A process waits in one place at a time, however many engines it has."""

atexit.register(watch.stop)
