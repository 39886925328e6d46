"""Ranks as threads of one process, and the smallest save and load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint import Exchange, load_tensors, save
from engine.contracts import Chunk, SavedLayout


class ThreadExchange(Exchange):
    """One rank of a world of threads that share ``slots``."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def gather(self, value: Any) -> list[Any] | None:
        self._slots[self.rank] = value
        self._barrier.wait()
        gathered = list(self._slots) if self.rank == 0 else None
        self._barrier.wait()
        return gathered

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self._slots[0] = value
        self._barrier.wait()
        received = self._slots[0]
        self._barrier.wait()
        return received


def on_ranks(world_size: int, action: Callable[[Exchange], Any]) -> list[Any]:
    """``action(exchange)`` on every rank at once: its results, or the exceptions that it raised."""
    slots: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=20)
    results: list[Any] = [None] * world_size

    def body(rank: int) -> None:
        try:
            results[rank] = action(ThreadExchange(rank, slots, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def layout_of(world_size: int, **changes: Any) -> SavedLayout:
    fields = {"world_size": world_size, "zero_stage": 1, "mesh": {"dp_shard": world_size}, "global_batch_size": 24}
    return SavedLayout(**{**fields, **changes})


def whole(name: str, tensor: torch.Tensor) -> Chunk:
    shape = tuple(tensor.shape)
    return Chunk(name, shape, (0,) * len(shape), shape, tensor)


def part(name: str, tensor: torch.Tensor, box: tuple[tuple[int, ...], tuple[int, ...]]) -> Chunk:
    """``box`` of a whole ``tensor``: a view."""
    view = tensor
    for dimension, (offset, size) in enumerate(zip(*box, strict=True)):
        view = view.narrow(dimension, offset, size)
    return Chunk(name, tuple(tensor.shape), *box, view)


class World:
    """Saves and loads with as many ranks as there are lists of chunks. Raises what rank 0 raised, after checking that
    every rank raised the same."""

    part = staticmethod(part)
    whole = staticmethod(whole)
    layout = staticmethod(layout_of)
    on_ranks = staticmethod(on_ranks)

    @staticmethod
    def results(results: list[Any]) -> list[Any]:
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            assert len(errors) == len(results), f"some ranks went on: {results}"
            assert len({(type(error), str(error)) for error in errors}) == 1, results
            raise errors[0]
        return results

    def save(self, directory: Path, tag: Any, by_rank: Sequence[Sequence[Chunk]], **options: Any) -> Path:
        """``options`` override `save`'s; a callable is called with the rank."""
        world_size = len(by_rank)

        def one(exchange: Exchange) -> Path:
            arguments: dict[str, Any] = {
                "states": {},
                "layout": layout_of(world_size),
                "client_state": {},
                "config": {},
                "counters": {"global_steps": 0},
                "aliases": {},
            }
            given = {key: value(exchange.rank) if callable(value) else value for key, value in options.items()}
            own_tag = tag(exchange.rank) if callable(tag) else tag
            return save(
                directory,
                own_tag,
                chunks=by_rank[exchange.rank],
                rank=exchange.rank,
                world_size=world_size,
                group=exchange,
                **{**arguments, **given},
            )

        return self.results(on_ranks(world_size, one))[0]

    def load(self, directory: Path, tag: Any, by_rank: Sequence[Sequence[Chunk]], **options: Any) -> list[Any]:
        def one(exchange: Exchange) -> Any:
            arguments = {"rank": exchange.rank, "world_size": len(by_rank), "group": exchange}
            return load_tensors(directory, tag, by_rank[exchange.rank], **arguments, **options)

        return self.results(on_ranks(len(by_rank), one))


@pytest.fixture(scope="session")
def world() -> World:
    return World()
