"""What a cell of the composition matrix comes to: refused by the plan, by name, or equal to the oracle."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import ConfigError, load_config
from engine.config.messages import Problem
from engine.data.analysis import analyze
from engine.data.difficulty import Metric
from engine.plan import World, plan
from tests.harness import Ranks
from tests.parity.composition.features import Cell, cell_of
from tests.parity.composition.model import Samples
from tests.parity.composition.oracle import oracle
from tests.parity.composition.runs import Batch, Seen, order, run
from tests.parity.toy import Result

TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Tolerance:
    """``losses`` and ``parameters`` absolute, ``norms`` relative. Parameters move by about 0.1 in these runs."""

    losses: float = 1e-5
    parameters: float = 1e-5
    norms: float = 1e-5


MUON = Tolerance(5e-4, 5e-3, 2e-3)
"""Muon orthogonalises in bf16, which turns rounding noise into parts of a step of 2e-2."""
HALF = {"bf16": Tolerance(3e-2, 1e-2, 5e-2), "fp16": Tolerance(4e-3, 2e-3, 1e-2)}


def tolerance_of(cell: Cell) -> Tolerance:
    """The widest of those that apply."""
    applying = [Tolerance(), HALF.get(cell.precision, Tolerance())]
    if cell.optimizer["type"] == "Muon":
        applying.append(MUON)
    return Tolerance(
        max(tolerance.losses for tolerance in applying),
        max(tolerance.parameters for tolerance in applying),
        max(tolerance.norms for tolerance in applying),
    )


def refusals(cell: Cell) -> tuple[Problem, ...]:
    """The plan's problems, before any rank starts."""
    return _problems(cell.first.name, cell.second.name)


@functools.cache
def _problems(first: str, second: str) -> tuple[Problem, ...]:
    cell = cell_of(first, second)
    try:
        plan(load_config(cell.config()), World(cell.world, cell.world))
    except ConfigError as error:
        return tuple(error.problems)
    return ()


@functools.cache
def index_in(folder: Path) -> str:
    """The sampler's index, made once."""
    return str(analyze(Samples(), [Metric("vocabularyrarity")], folder / "index"))


@dataclass(frozen=True)
class Deviation:
    losses: float
    parameters: float
    norms: float

    def within(self, bounds: Tolerance) -> bool:
        return self.losses <= bounds.losses and self.parameters <= bounds.parameters and self.norms <= bounds.norms

    def __str__(self) -> str:
        return f"{max(self.losses, self.parameters):.0e}"


def deviation_of(cell: Cell, ranks: Ranks, folder: Path) -> Deviation:
    """Run the cell on its ranks and compare it with the oracle. Raises AssertionError for what is neither equal nor
    alike on all ranks."""
    by_rank: list[Seen] = ranks(cell.world).run(
        run, cell, index_in(folder), str(folder / "run"), timeout=TIMEOUT_SECONDS
    )
    first = by_rank[0]
    for seen in by_rank[1:]:
        assert seen.result.losses == first.result.losses, "ranks report different losses"
        assert seen.result.norms == first.result.norms or cell.has("overflow"), "ranks report different norms"
        assert seen.layers_skipped == first.layers_skipped, "ranks count different layers"
        for name, value in first.result.parameters.items():
            assert torch.equal(seen.result.parameters[name], value), f"ranks hold different values of {name}"
    assert first.applied == [not cell.overflows(step) for step in range(cell.steps)], f"applied {first.applied}"
    batches = _in_order(cell, by_rank) if cell.has("loads") else None
    if batches is not None:
        _check_order(cell, batches, index_in(folder))
    return compare(oracle(cell, batches), first.result)


def compare(expected: Result, found: Result) -> Deviation:
    assert found.parameters.keys() == expected.parameters.keys()
    pairs = [(a, b) for a, b in zip(found.norms, expected.norms, strict=True) if math.isfinite(a) or math.isfinite(b)]
    return Deviation(
        max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
        max((found.parameters[name] - value).abs().max().item() for name, value in expected.parameters.items()),
        max(abs(a - b) / abs(b) for a, b in pairs),
    )


def _in_order(cell: Cell, by_rank: list[Seen]) -> list[list[Batch]]:
    """The batches of each step, part by part. Ranks with one place on the dp axis must have got the same."""
    by_place: dict[int, Seen] = {}
    for seen in by_rank:
        other = by_place.setdefault(seen.place, seen)
        for mine, theirs in zip(seen.batches, other.batches, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a), "peers got different batches"
    return [
        [by_place[place].batches[step][micro] for micro in range(cell.accumulation) for place in range(cell.dp)]
        for step in range(cell.steps)
    ]


def _check_order(cell: Cell, batches: list[list[Batch]], index: str) -> None:
    """Each step has the samples that it has in one process with the loader alone."""
    loads = next(feature.name for feature in cell.features if feature.key == "data")
    for step, (parts, whole) in enumerate(zip(batches, _order_of(loads, index), strict=False)):
        length = parts[0]["input_ids"].shape[1]
        mine = {tuple(row[:length].tolist()) for part in parts for row in part["input_ids"]}
        theirs = {tuple(row[:length].tolist()) for row in whole["input_ids"]}
        assert mine >= theirs, f"step {step} has other samples than in one process"


@functools.cache
def _order_of(loads: str, index: str) -> list[Batch]:
    return order(cell_of("none", loads), index)
