"""A cell's run in the engine, as each rank sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import engine
from tests.parity.composition.features import Cell
from tests.parity.composition.model import Samples, batch_of, model_of
from tests.parity.one_bit_runs import exactly
from tests.parity.toy import Result, part

Batch = dict[str, Tensor]


@dataclass
class Seen:
    """``batches``: this rank's micro-batches by step, as its loader gave them. ``place``: on the dp axis."""

    result: Result = field(default_factory=Result)
    applied: list[bool] = field(default_factory=list)
    batches: list[list[Batch]] = field(default_factory=list)
    place: int = 0
    layers_skipped: int = 0


def run(cell: Cell, index: str, folder: str) -> Seen:
    """The 1-bit optimizers average without rounding to signs: what signs make of gradients is proved elsewhere
    (tests/parity/test_one_bit.py), and here it would drown everything else."""
    seen = Seen()
    started, batches = _start(cell, index, seed=0)
    for step in range(cell.steps):
        if cell.has("resumes") and step == cell.saved_after:
            checkpoint = os.path.join(folder, "checkpoint")
            started.save_checkpoint(checkpoint)
            started.destroy()
            started, batches = _start(cell, index, seed=1)
            started.load_checkpoint(checkpoint)
        started.module.poison = cell.overflows(step) and started.mesh.dp_rank == 0
        own = [_next(cell, started, batches, step, micro) for micro in range(cell.accumulation)]
        _step(cell, started, own)
        report = started.last_report
        assert report is not None
        seen.batches.append(own)
        seen.applied.append(report.applied)
        seen.result.losses.append(report.loss if report.loss is not None else float("nan"))
        seen.result.norms.append(report.grad_norm if report.grad_norm is not None else float("nan"))
    seen.result.parameters = {name: value.float() for name, value in started.full_parameters().items()}
    seen.place, seen.layers_skipped = started.mesh.dp_rank, started.layers_skipped
    started.destroy()
    return seen


def _start(cell: Cell, index: str, seed: int) -> tuple[engine.Engine, Iterator[Batch]]:
    data = Samples() if cell.has("loads") else None
    started, _, loader, _ = engine.initialize(model=model_of(cell, seed), config=cell.config(index), training_data=data)
    if cell.is_one_bit:
        assert started.optimizer is not None
        inner: Any = started.optimizer.inner[0]
        inner.reduce = exactly(started, inner)
    return started, iter(loader if loader is not None else ())


def _next(cell: Cell, started: engine.Engine, batches: Iterator[Batch], step: int, micro: int) -> Batch:
    if cell.has("loads"):
        return next(batches)
    return part(batch_of(step), micro * started.mesh.dp_size + started.mesh.dp_rank, cell.num_parts)


def _step(cell: Cell, started: engine.Engine, batches: list[Batch]) -> None:
    if cell.has("train_batch"):
        started.train_batch(iter(batches))
        return
    for batch in batches:
        started.backward(started(**batch))
        started.step()


def order(cell: Cell, index: str) -> list[Batch]:
    """One process: the batches of its steps, in the loader's own order."""
    started, batches = _start(cell, index, seed=0)
    found = []
    for _ in range(cell.steps):
        found.append(next(batches))
        started.backward(started(**found[-1]))
        started.step()
    started.destroy()
    return found
