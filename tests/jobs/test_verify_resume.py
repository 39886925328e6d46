"""`ptrain verify-resume`: equal for what is right, and the cause by name for each planted fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.scaled import scaled_overrides
from engine.cli.verify_resume import stops_of
from engine.config import load_config
from tests.jobs.job import EXAMPLE, Finished, run, settings

BUILDS = Path(__file__).with_name("resume_faults.py")
CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def verify(folder: Path, build: str, *more: str) -> Finished:
    path = folder / "run.json"
    path.write_text(json.dumps(CONFIG))
    return run(["verify-resume", str(path), "--build", f"{BUILDS}:{build}", "--steps", "6", *more], cwd=folder)


def test_a_text_config_made_small_is_equal_on_two_ranks(tmp_path, text):
    changes = {
        "model.tiny": {"num_blocks": 2, "width": 16, "num_heads": 2, "sequence_length": 16, "dropout": 0.1},
        "data.path": str(text),
        "zero_optimization.stage": 2,
        "gradient_accumulation_steps": 2,
    }
    finished = run(["verify-resume", str(EXAMPLE), "--nproc", "2", "--steps", "6", *settings(changes)], cwd=tmp_path)
    assert finished.code == 0, finished.err
    assert "made small by model.tiny: num_blocks 2, width 16" in finished.out
    assert "2 ranks, 6 steps: straight, and stopped after 1, 3 and 4" in finished.out
    assert "EQUAL to the bit: 6 steps" in finished.out
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_is_right(tmp_path):
    finished = verify(tmp_path, "right")
    assert finished.code == 0, finished.err
    assert "EQUAL to the bit" in finished.out


FAULTS = {
    "unseeded": ["step 1 (before any stop)", "a generator that is not seeded"],
    "seeded_but_not_saved": ["step 2 (resumed at step 1)", "0 of 4 samples", "not restored: generator of the dataset"],
    "forgetful": [
        "step 2 (resumed at step 1)",
        "the learning rate is 0.01 instead of 0.02",
        "num_steps of the schedule",
    ],
}
SLOW_FAULTS = {
    "disorderly": ["the same samples come in another order", "turn of the dataset"],
    "counting": ["the model has state that is not in the checkpoint", "not restored: num_calls of the model"],
}


def red(folder: Path, fault: str, said: list[str]) -> None:
    finished = verify(folder, fault)
    assert finished.code == 1, finished.out + finished.err
    for words in ("verify-resume: NOT EQUAL", *said):
        assert words in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(tmp_path, fault):
    red(tmp_path, fault, FAULTS[fault])


@pytest.mark.slow
@pytest.mark.parametrize("fault", SLOW_FAULTS)
def test_another_planted_fault_is_named(tmp_path, fault):
    red(tmp_path, fault, SLOW_FAULTS[fault])


def test_mistakes(tmp_path):
    finished = verify(tmp_path, "broken")
    assert finished.code == 2
    assert "must return a dict with model and training_data" in finished.err
    finished = run(["verify-resume", str(tmp_path / "run.json")], cwd=tmp_path)
    assert finished.code == 2
    assert "model.target is missing" in finished.err
    finished = verify(tmp_path, "right", "--steps", "3")
    assert finished.code == 2
    assert "too few for three stops" in finished.err


# --- the parts that need no run --------------------------------------------------------------------------------


def test_stops():
    assert stops_of(40) == [7, 20, 33]
    assert stops_of(12) == [2, 6, 9]
    assert stops_of(4) == [1, 2, 3]


def test_sizes_of_hugging_faces_configs_are_made_small():
    arguments = {"config": {"num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 100}, "n_layer": 1, "name": "x"}
    config = load_config({"model": {"target": "m.py:f", "args": arguments}, "train_batch_size": 1})
    changes, said = scaled_overrides(config)
    assert changes == ["model.args.config.num_hidden_layers=2", "model.args.config.hidden_size=64"]
    assert "Hugging Face" in said[0]
    config = load_config({"model": {"target": "m.py:f", "args": {"width": 9}}, "train_batch_size": 1})
    changes, said = scaled_overrides(config)
    assert changes == []
    assert "full size" in said[0]
    tiny = {"target": "m.py:f", "args": {"width": 9}, "tiny": {"width": 4, "sequence_length": 8}}
    config = load_config({"model": tiny, "train_batch_size": 1})
    changes, _ = scaled_overrides(config)
    assert changes == ["model.args.width=4", "model.args.sequence_length=8", "data.sequence_length=8"]
