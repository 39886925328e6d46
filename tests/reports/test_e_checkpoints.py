"""Theme E, checkpoints: what a load restores, what it says of the rest, and what a damaged folder does."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.checkpoint import CheckpointError, list_tags, read_manifest, synced_file
from engine.contracts import EngineError
from tests.harness import RankFailed
from tests.parity.runs import pieces_of
from tests.parity.small import config_of, regression_batch, run_steps, seeded
from tests.parity.test_resume import moments_of
from tests.parity.tiers import slow

STAGES = range(4)


class Mixed(nn.Module):
    """Frozen, 0-dim and empty parameters, normalisation with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.first.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.scale * self.norm(self.first(x)).relu()
        return nn.functional.mse_loss(self.last(hidden) + self.nothing.sum(), y)


def start(stage: int, **more: Any) -> engine.Engine:
    return engine.initialize(model=seeded(Mixed), config=config_of(stage, 1, **more))[0]


def values_of(model_engine: engine.Engine) -> dict[str, Tensor]:
    """This rank's parameters and moments, by name and place, and on rank 0 the buffers, of which its own are saved."""
    pieces = [*pieces_of(model_engine), *moments_of(model_engine)]
    values = {f"{name} at {start}": flat for name, _, start, flat in pieces}
    if model_engine.global_rank > 0:
        return values
    return values | {name: buffer.clone() for name, buffer in model_engine.module.named_buffers()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def what_loading_says(model_engine: engine.Engine, folder: Path, **options: Any) -> list[str]:
    records = Records()
    logging.getLogger("engine").addHandler(records)
    try:
        model_engine.load_checkpoint(folder, **options)
    finally:
        logging.getLogger("engine").removeHandler(records)
    return records.lines


# --- E3: a load fills every parameter and moment, and a save is whole whatever the load flag ------------------


def load_then_save_again(stage: int, folder: Path) -> tuple[set[str], set[str]]:
    model_engine = start(stage)
    run_steps(model_engine, regression_batch, 3)
    model_engine.save_checkpoint(folder / "first")
    saved = values_of(model_engine)
    model_engine.destroy()
    other = start(stage, checkpoint={"load_universal": True})
    run_steps(other, regression_batch, 1)
    other.load_checkpoint(folder / "first")
    assert_equal(values_of(other), saved)
    other.save_checkpoint(folder / "second")
    other.destroy()
    contents = []
    for name in ("first", "second"):
        manifest = read_manifest(folder / name)
        assert manifest is not None
        contents.append({*manifest.tensors, *manifest.files, *manifest.states})
    return contents[0], contents[1]


@pytest.mark.parametrize("stage", STAGES)
def test_e3_a_load_fills_everything_and_the_next_save_is_whole(ranks, tmp_path, stage):
    for first, second in ranks(2).run(load_then_save_again, stage, tmp_path):
        assert first == second
        assert {"parameters.nothing", "parameters.first.weight", "optimizer.scale.exp_avg"} <= first
        assert {"buffers.norm.running_mean", "rank_00000.safetensors", "run"} <= first


# --- E7: a save works at any moment ---------------------------------------------------------------------------


def save_at_any_moment(stage: int, folder: Path) -> None:
    model_engine = start(stage)
    model_engine.save_checkpoint(folder / "before any step")
    run_steps(model_engine, regression_batch, 2)
    model_engine.save_checkpoint(folder / "after")
    saved = values_of(model_engine)
    model_engine.destroy()
    other = start(stage)
    other.load_checkpoint(folder / "after")
    other.save_checkpoint(folder / "at once")
    other.destroy()
    third = start(stage)
    third.load_checkpoint(folder / "at once")
    assert_equal(values_of(third), saved)
    third.load_checkpoint(folder / "before any step")
    assert third.global_steps == 0
    third.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_e7_load_then_save_and_save_before_the_first_step(ranks, tmp_path, stage):
    ranks(2).run(save_at_any_moment, stage, tmp_path)


# --- E9: what is not there is an error on all ranks, or (None, None) for an empty folder -----------------------


def load_what_is_damaged(folder: Path) -> dict[str, str]:
    model_engine = start(3)
    outcomes = {}
    for name in sorted(os.listdir(folder)):
        try:
            outcomes[name] = str(model_engine.load_checkpoint(folder / name))
        except EngineError as error:
            outcomes[name] = str(error)
    outcomes["missing"] = str(model_engine.load_checkpoint(folder / "missing"))
    model_engine.destroy()
    return outcomes


def save_four_times(folder: Path) -> None:
    model_engine = start(3)
    for name in ("no latest", "absent tag", "lost shard", "whole"):
        model_engine.save_checkpoint(folder / name, tag="t")
    model_engine.destroy()


def test_e9_a_folder_without_a_checkpoint_never_passes_for_one(ranks, tmp_path):
    ranks(2).run(save_four_times, tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "no latest" / "latest").unlink()
    (tmp_path / "absent tag" / "latest").write_text("elsewhere\n")
    (tmp_path / "lost shard" / "t" / "rank_00001.safetensors").unlink()
    first, second = ranks(2).run(load_what_is_damaged, tmp_path)
    assert first == second
    assert first["empty"] == first["missing"] == "(None, None)"
    assert "has no 'latest' file. Tags there: t" in first["no latest"]
    assert "lacks 'elsewhere'" in first["absent tag"]
    assert "Tags there: t" in first["absent tag"]
    assert "rank_00001.safetensors is missing" in first["lost shard"]
    assert first["whole"] == f"('{tmp_path / 'whole' / 't'}', {{}})"


# --- E12: weights without the rest --------------------------------------------------------------------------


def resume_from_weights(stage: int, folder: Path) -> tuple[list[str], list[str], list[str]]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    without = config_of(stage, 1)
    del without["optimizer"]
    weights_only, *_ = engine.initialize(model=seeded(Mixed), config=without)
    with torch.no_grad():
        for shard in [*weights_only.roles.reduction.shards, *weights_only._state._frozen]:  # type: ignore[attr-defined]
            shard.parameter.fill_(0.25)
    weights_only.roles.reduction.publish()
    weights_only.save_checkpoint(folder / "weights")
    weights_only.destroy()

    model_engine = start(stage, scheduler=schedule)
    run_steps(model_engine, regression_batch, 2)
    model_engine.save_checkpoint(folder / "all")
    absent = what_loading_says(model_engine, folder / "weights")
    assert all(flat.eq(0.25).all() for _, _, _, flat in pieces_of(model_engine))
    assert not any(
        state.get("exp_avg", torch.zeros(())).any() for state in model_engine.optimizer.named_state().values()
    )
    assert model_engine.global_steps == 0
    asked = what_loading_says(model_engine, folder / "all", load_module_only=True)
    partly = what_loading_says(
        model_engine, folder / "all", load_optimizer_states=False, load_lr_scheduler_states=False
    )
    everything = what_loading_says(model_engine, folder / "all")
    assert everything == []
    model_engine.destroy()
    return absent, asked, partly


@pytest.mark.parametrize("stage", [0, 3])
def test_e12_weights_alone_load_and_the_load_says_what_did_not(ranks, tmp_path, stage):
    (absent, asked, partly), others = ranks(2).run(resume_from_weights, stage, tmp_path)
    assert others == ([], [], [])  # rank 0 speaks
    assert absent == ["Not in the checkpoint, these begin anew: the learning-rate schedule, the optimizer's state."]
    assert "Not restored: the state of 'optimizer_groups'." in asked
    assert "Not restored: the state of 'lr_scheduler'." in asked
    assert "Not restored: the state of 'run'." in asked
    assert any(line.startswith("Not restored: ") and "saved tensors of 'optimizer'" in line for line in asked)
    assert "Not restored: the state of 'run'." not in partly
    assert "Not restored: the state of 'lr_scheduler'." in partly


# --- E13: a rank that is killed while it saves ---------------------------------------------------------------


def die_while_saving(folder: Path, background: bool) -> None:
    model_engine = start(3, checkpoint={"async": background})
    run_steps(model_engine, regression_batch, 1)
    model_engine.save_checkpoint(folder)
    model_engine.wait_for_checkpoint()
    run_steps(model_engine, regression_batch, 1, first=1)
    if model_engine.global_rank == 1:
        write = synced_file.SyncedFile._write_out

        def half(file: synced_file.SyncedFile, data: memoryview) -> None:
            write(file, data[: len(data) // 2 // synced_file.BLOCK_BYTES * synced_file.BLOCK_BYTES])
            time.sleep(0.3)  # rank 0 has written its part by now
            os.kill(os.getpid(), signal.SIGKILL)

        synced_file.SyncedFile._write_out = half  # type: ignore[method-assign]
    model_engine.save_checkpoint(folder)
    while True:  # what the next steps of training would be
        run_steps(model_engine, regression_batch, 1, first=2)


def load_the_latest(folder: Path) -> tuple[str | None, int]:
    model_engine = start(1)
    path, _ = model_engine.load_checkpoint(folder)
    found = path, model_engine.global_steps
    run_steps(model_engine, regression_batch, 1, first=1)
    model_engine.save_checkpoint(folder)
    model_engine.destroy()
    return found


@pytest.mark.parametrize("background", [slow(False), True])
def test_e13_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(ranks, tmp_path, background):
    with pytest.raises(RankFailed, match="rank 1 died with exit code -9"):
        ranks(2).run(die_while_saving, tmp_path, background)
    assert (tmp_path / "latest").read_text() == "global_step1\n"
    assert list_tags(tmp_path) == ["global_step1"]
    assert ranks(2).run(load_the_latest, tmp_path) == [(str(tmp_path / "global_step1"), 1)] * 2
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "global_step2", "latest"]


# --- E17: the optimizer's state, with and without -------------------------------------------------------------


def round_trip(stage: int, folder: Path) -> list[tuple[Any, Any, dict[str, Any]]]:
    """What was saved and what came back: before there is a state, and after two steps."""
    found = []
    for steps in (0, 2):
        model_engine = start(stage)
        run_steps(model_engine, regression_batch, steps)
        model_engine.save_checkpoint(folder / str(steps))
        saved = model_engine.optimizer.named_state()
        model_engine.destroy()
        other = start(stage)
        run_steps(other, regression_batch, 5)
        other.load_checkpoint(folder / str(steps))
        loaded = other.optimizer.named_state()
        counts = {name: float(entry["step"]) for name, entry in loaded.items()}
        same = saved.keys() == loaded.keys() and all(
            torch.equal(torch.as_tensor(saved[name][key]), torch.as_tensor(loaded[name][key]))
            for name in saved
            for key in saved[name]
        )
        found.append((steps, same, counts))
        other.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_e17_adam_makes_the_round_trip_with_its_step_counts(ranks, tmp_path, stage):
    for before, after in ranks(2).run(round_trip, stage, tmp_path):
        assert before == (0, True, {})
        assert after[:2] == (2, True)
        assert set(after[2].values()) == {2.0}


# --- saving from one rank only -------------------------------------------------------------------------------


def save_on_rank_zero_only(folder: Path) -> tuple[str, float]:
    model_engine = start(1, checkpoint={"rank_timeout_seconds": 0.5})
    run_steps(model_engine, regression_batch, 1)
    started, message = time.monotonic(), ""
    if model_engine.global_rank == 0:
        try:
            model_engine.save_checkpoint(folder)
        except EngineError as error:
            message = str(error)
    took = time.monotonic() - started
    run_steps(model_engine, regression_batch, 1, first=1)
    model_engine.save_checkpoint(folder)  # together: it works
    try:
        if model_engine.global_rank == 2:
            model_engine.load_checkpoint(folder)
        else:
            model_engine.save_checkpoint(folder)
    except EngineError as error:
        message += f" / {error}"
    model_engine.destroy()
    return message, took


def test_e_a_save_on_one_rank_is_refused_and_names_the_others(ranks, tmp_path):
    outcomes = ranks(3).run(save_on_rank_zero_only, tmp_path)
    alone, _, mixed = outcomes[0][0].partition(" / ")
    assert alone.startswith("save_checkpoint() was called by rank 0 and not by ranks 1, 2 within 0.5 s: all ranks must")
    assert outcomes[0][1] < 5
    assert mixed.startswith(
        "save_checkpoint() was called by ranks 0, 1 and not by rank 2 (load_checkpoint() by rank 2 i"
    )
    assert list_tags(tmp_path) == ["global_step2"]


# --- frozen parameters left out --------------------------------------------------------------------------------


def leave_the_frozen_out(stage: int, folder: Path) -> tuple[set[str], str]:
    model_engine = start(stage)
    model_engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    manifest = read_manifest(folder)
    assert manifest is not None
    try:
        model_engine.load_checkpoint(folder)
        refusal = ""
    except CheckpointError as error:
        refusal = str(error)
    model_engine.load_checkpoint(folder, load_module_strict=False)
    model_engine.destroy()
    return {name for name in manifest.tensors if name.startswith("parameters.")}, refusal


@pytest.mark.parametrize("stage", [1, 3])
def test_e_frozen_parameters_are_left_out_if_asked(ranks, tmp_path, stage):
    for names, refusal in ranks(2).run(leave_the_frozen_out, stage, tmp_path):
        trained = ("last.bias", "last.weight", "norm.bias", "norm.weight", "nothing", "scale")
        assert names == {f"parameters.{name}" for name in trained}
        assert "not in the checkpoint: parameters.first.bias, parameters.first.weight" in refusal
        assert "load_module_strict=False" in refusal
