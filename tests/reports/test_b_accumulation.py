"""Accumulation windows: who closes them, what they weigh, and where the numbers of the batch arithmetic come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.config import ConfigError
from tests.parity.small import Layers, config_of, regression_batch, seeded

WORLD = 2
STAGES = range(4)
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def micro_batch(number: int, rank: int, size: int = 3) -> dict[str, Tensor]:
    """The ``number``-th micro-batch of a rank: ``size`` samples that no other rank or number has."""
    batch = regression_batch(number * WORLD + rank)
    return {name: tensor[:size] for name, tensor in batch.items()}


class Plain:
    """One process that does for all ranks what the engine is asked to do, with gradients kept as plain sums."""

    def __init__(self) -> None:
        self.model = seeded(Layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, number: int, weight: float, size: int = 3) -> None:
        for rank in range(WORLD):
            (self.model(**micro_batch(number, rank, size)) * weight / WORLD).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def made(stage: int, accumulation: int, **more: Any) -> engine.Engine:
    return engine.initialize(model=seeded(Layers), config=config_of(stage, accumulation, optimizer=SGD, **more))[0]


def go(model_engine: engine.Engine, number: int, size: int = 3) -> None:
    model_engine.backward(model_engine(**micro_batch(number, dist.get_rank(), size)))


def assert_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for parameters in found:
        for name, tensor in expected.items():
            difference = (parameters[name] - tensor).abs().max().item()
            assert difference < 1e-6, f"{name} is off by {difference:.1e}"


# --- B5: the end of an epoch inside a window -----------------------------------------------------------------

NUM_PER_EPOCH, ACCUMULATION = 6, 4


def two_epochs(stage: int, at_end: str) -> tuple[dict[str, Tensor], list[int]]:
    model_engine = made(
        stage, ACCUMULATION, train_micro_batch_size_per_gpu=3, train_batch_size=WORLD * 3 * ACCUMULATION
    )
    open_micro_batches = []
    for epoch in range(2):
        for index in range(NUM_PER_EPOCH):
            go(model_engine, epoch * NUM_PER_EPOCH + index)
            model_engine.step()
        open_micro_batches.append(model_engine.micro_steps % ACCUMULATION)
        if at_end == "flush":
            model_engine.flush()
        elif at_end == "discard":
            model_engine.flush(discard=True)
    return model_engine.full_parameters(), [*open_micro_batches, model_engine.global_steps]


@functools.cache
def plain_two_epochs(at_end: str) -> dict[str, Tensor]:
    plain, pending = Plain(), 0
    for epoch in range(2):
        for index in range(NUM_PER_EPOCH):
            is_left_over = at_end != "carry" and index >= ACCUMULATION
            if at_end == "discard" and is_left_over:
                continue
            size = NUM_PER_EPOCH - ACCUMULATION if is_left_over else ACCUMULATION
            plain.backward(epoch * NUM_PER_EPOCH + index, 1 / size)
            pending += 1
            if pending == size:
                plain.step()
                pending = 0
    return plain.parameters()


def all_ends(stage: int) -> list[Any]:
    return [two_epochs(stage, at_end) for at_end in ("carry", "flush", "discard")]


@pytest.mark.parametrize("stage", STAGES)
def test_b5_a_window_carries_over_unless_it_is_flushed(ranks, stage):
    by_rank = ranks(WORLD).run(all_ends, stage)
    for index, (at_end, counts) in enumerate({"carry": [2, 0, 3], "flush": [2, 2, 4], "discard": [2, 2, 2]}.items()):
        assert_same([rank[index][0] for rank in by_rank], plain_two_epochs(at_end))
        assert [rank[index][1] for rank in by_rank] == [counts] * WORLD


# --- B6, B7, B8 ----------------------------------------------------------------------------------------------


def defer(model_engine: engine.Engine) -> None:
    for step in range(2):
        for micro in range(3):
            if micro < 2:
                with model_engine.no_sync():
                    go(model_engine, 3 * step + micro)
                    model_engine.step()
            else:
                go(model_engine, 3 * step + micro)
                model_engine.step()


def plain_three(plain: Plain) -> None:
    for step in range(2):
        for micro in range(3):
            plain.backward(3 * step + micro, 1 / 3)
        plain.step()


COUNTS = (1, 3, 5)


def unknown_numbers(model_engine: engine.Engine) -> None:
    for position, count in enumerate(COUNTS):
        for micro in range(count):
            go(model_engine, 10 * position + micro)
        model_engine.step()


def unknown_numbers_by_flag(model_engine: engine.Engine) -> None:
    for position, count in enumerate(COUNTS):
        for micro in range(count):
            model_engine.set_gradient_accumulation_boundary(micro == count - 1)
            go(model_engine, 10 * position + micro)
            model_engine.step()


def plain_unknown_numbers(plain: Plain) -> None:
    for position, count in enumerate(COUNTS):
        for micro in range(count):
            plain.backward(10 * position + micro, 1.0)
        plain.step()


def alternate_sizes(model_engine: engine.Engine) -> None:
    for number in range(4):
        go(model_engine, number, size=(8, 2)[number % 2])
        model_engine.step()


def plain_alternate_sizes(plain: Plain) -> None:
    for number in range(4):
        plain.backward(number, 1 / 2, size=(8, 2)[number % 2])
        if number % 2:
            plain.step()


Loop = tuple[Callable[[engine.Engine], None], Callable[[Plain], None], int, dict[str, Any]]
LOOPS: dict[str, Loop] = {
    "b6 no_sync": (defer, plain_three, 3, {"train_batch_size": 18}),
    "b7 unmanaged": (unknown_numbers, plain_unknown_numbers, 1, {"managed_gradient_accumulation": False}),
    "b7 by flag": (unknown_numbers_by_flag, plain_unknown_numbers, 1, {}),
    "b8 sizes": (alternate_sizes, plain_alternate_sizes, 2, {}),
}


def run_loops(stage: int) -> dict[str, dict[str, Tensor]]:
    outcomes = {}
    for name, (loop, _, accumulation, more) in LOOPS.items():
        model_engine = made(stage, accumulation, **more)
        loop(model_engine)
        outcomes[name] = model_engine.full_parameters()
        model_engine.destroy()
    return outcomes


@pytest.fixture(scope="module")
def loops(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(run_loops, stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", LOOPS)
def test_b6_b7_b8_windows_equal_a_plain_loop(loops, name, stage):
    plain = Plain()
    LOOPS[name][1](plain)
    assert_same([outcomes[name] for outcomes in loops(stage)], plain.parameters())


# --- B1: a config read where there is only one rank ----------------------------------------------------------

TRIPLE = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def accept_triple() -> int:
    return engine.initialize(model=nn.Linear(2, 2), config={**TRIPLE, "optimizer": SGD})[0].train_batch_size()


def test_b1_the_batch_fits_once_the_group_is_there(ranks):
    assert ranks(WORLD).run(accept_triple) == [8, 8]


def test_b1_without_a_group_the_message_says_how_many_ranks_were_found_and_why():
    with pytest.raises(ConfigError) as refused:
        accept_triple()
    message = str(refused.value)
    assert all(word in message for word in ("8", "2", "train_batch_size", "no process group")), message
