"""Runs with 1-bit optimizers that stop and go on, under the same ranks and under others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from tests.parity.one_bit_runs import KINDS, config_of, inner_of, start, state_of, values_of, window


def save_and_go_on(kind: str, folder: Path, steps: tuple[int, int]) -> dict[str, Any]:
    model_engine = start(config_of(kind, {**KINDS[kind], "compression_unit": "bucket"}))
    for step in range(steps[0]):
        window(model_engine, step)
    model_engine.save_checkpoint(str(folder))
    for step in range(steps[0], sum(steps)):
        window(model_engine, step)
    result = end_of(model_engine)
    model_engine.destroy()
    return result


def end_of(model_engine: engine.Engine) -> dict[str, Any]:
    tensors = {f"value {name}": value for name, value in values_of(model_engine).items()}
    tensors |= {f"{name} {key}": v for name, state in state_of(model_engine).items() for key, v in state.items()}
    return tensors | {f"rank {n}": v.clone() for n, v in inner_of(model_engine).rank_tensors().items()}


def load_and_go_on(kind: str, folder: Path, first: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model_engine = start(config_of(kind, {**KINDS[kind], "compression_unit": "bucket"}))
    for step in range(2):  # what is there before the load must not matter
        window(model_engine, 100 + step)
    model_engine.load_checkpoint(str(folder))
    loaded = end_of(model_engine)
    for step in range(first, first + steps):
        window(model_engine, step)
    result = end_of(model_engine)
    model_engine.destroy()
    return loaded, result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_at", [3, 8, 9])
def test_a_resumed_run_is_the_run_that_never_stopped(ranks, kind, saved_at, tmp_path):
    whole = ranks(2).run(save_and_go_on, kind, tmp_path, (saved_at, 5))
    resumed = ranks(2).run(load_and_go_on, kind, tmp_path, saved_at, 5)
    for answer, (_, again) in zip(whole, resumed, strict=True):
        assert answer.keys() == again.keys()
        for name, tensor in answer.items():
            assert torch.equal(tensor, again[name]), name
    if saved_at > 4:
        assert any(name.startswith("rank ") and tensor.any() for name, tensor in resumed[0][0].items())


@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_begin_with_errors_of_zero(ranks, kind, tmp_path):
    whole = ranks(2).run(save_and_go_on, kind, tmp_path, (9, 0))
    for loaded, result in ranks(4).run(load_and_go_on, kind, tmp_path, 9, 4):
        for name, tensor in loaded.items():
            if name.startswith("rank "):
                assert not tensor.any(), name
            else:
                assert torch.equal(tensor, whole[0][name]), name
        assert all(tensor.isfinite().all() for tensor in result.values())


def notes_of_load(kind: str, folder: Path) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine").addHandler(handler)
    try:
        load_and_go_on(kind, folder, 9, 0)
    finally:
        logging.getLogger("engine").removeHandler(handler)
    return records


def test_a_load_says_that_errors_were_dropped(ranks, tmp_path):
    ranks(2).run(save_and_go_on, "OneBitAdam", tmp_path, (9, 0))
    (notes,) = ranks(1).run(notes_of_load, "OneBitAdam", tmp_path)
    assert any("begin at zero again" in note for note in notes)
    notes, _ = ranks(2).run(notes_of_load, "OneBitAdam", tmp_path)
    assert not any("begin at zero again" in note for note in notes)
