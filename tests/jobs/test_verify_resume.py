"""`ptrain verify-resume`: equal for what is right, and the cause by name for each planted fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.resume_verdict import first_difference
from engine.cli.scaled import scaled_overrides
from engine.cli.verify_resume import stops_of
from engine.config import load_config
from tests.jobs.job import EXAMPLE, Finished, run, settings, start

BUILDS = Path(__file__).with_name("resume_faults.py")
CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def verify(folder: Path, build: str, *more: str) -> Finished:
    path = folder / "run.json"
    path.write_text(json.dumps(CONFIG))
    return finish(folder, [str(path), "--build", f"{BUILDS}:{build}", "--steps", "6", *more])


def finish(folder: Path, arguments: list[str]) -> Finished:
    """Five starts of ranks one after the other."""
    return start(["verify-resume", *arguments], cwd=folder).finish(timeout=280)


@pytest.mark.slow
def test_a_text_config_made_small_is_equal_on_two_ranks(tmp_path, text):
    changes = {
        "model.tiny": {"num_blocks": 2, "width": 16, "num_heads": 2, "sequence_length": 16, "dropout": 0.1},
        "data.path": str(text),
        "zero_optimization.stage": 2,
        "gradient_accumulation_steps": 2,
    }
    finished = finish(tmp_path, [str(EXAMPLE), "--nproc", "2", "--steps", "6", *settings(changes)])
    assert finished.code == 0, finished.err
    assert "made small by model.tiny: num_blocks 2, width 16" in finished.out
    assert "2 ranks, 6 steps: straight, and stopped after 1, 3 and 4" in finished.out
    assert "EQUAL to the bit: 6 steps" in finished.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_build_that_is_right(tmp_path):
    finished = verify(tmp_path, "right")
    assert finished.code == 0, finished.err
    assert "EQUAL to the bit" in finished.out


FAULTS = {
    "forgetful": [
        "step 2 (resumed at step 1)",
        "the learning rate is 0.01 instead of 0.02",
        "num_steps of the schedule",
    ],
    "unseeded": ["step 1 (before any stop)", "a generator that is not seeded"],
    "seeded_but_not_saved": ["step 2 (resumed at step 1)", "0 of 4 samples", "not restored: generator of the dataset"],
    "disorderly": ["the same samples come in another order", "turn of the dataset"],
    "counting": ["the model has state that is not in the checkpoint", "not restored: num_calls of the model"],
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.matrix if fault in ("disorderly", "counting") else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_named(tmp_path, fault):
    finished = verify(tmp_path, fault)
    assert finished.code == 1, finished.out + finished.err
    for words in ("verify-resume: NOT EQUAL", *FAULTS[fault]):
        assert words in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.slow
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


# --- the verdict, from traces ----------------------------------------------------------------------------------


def line(step: int, **changes: Any) -> dict[str, Any]:
    samples = [f"sample{2 * step}", f"sample{2 * step + 1}"]
    return {
        "step": step,
        "kind": "step",
        "said": [],
        "loss": 1.0 / (step + 1),
        "lr": [0.1],
        "loss_scale": 1.0,
        "data": [{"batch": f"batch{step}", "samples": samples}],
        "parameters": {"w": f"w{step}", "b": f"b{step}"},
        "moments": {"w.exp_avg": f"m{step}"},
        "attributes": {"the model": {"num_calls": str(step)}},
        **changes,
    }


def traces(part: int, step: int, **changes: Any) -> tuple[Any, Any]:
    """Of 2 ranks, 6 steps, stopped after 2 and 4; rank 1 differs in ``step`` of ``part``."""
    straight = [[line(number) for number in range(7)]] * 2
    bounds = [(0, 2), (2, 4), (4, 6)]
    parts = [[[line(number) for number in range(low, high + 1)] for _ in range(2)] for low, high in bounds]
    changed = parts[part][1]
    changed[step - bounds[part][0]] = line(step, **changes)
    return straight, parts


DIFFERENCES = [
    (
        (1, 3, {"data": [{"batch": "x", "samples": ["sample7", "sample6"]}]}),
        "step 3, rank 1 (resumed at step 2)",
        "order",
    ),
    ((1, 3, {"data": [{"batch": "x", "samples": ["a", "sample6"]}]}), "step 3, rank 1", "1 of 2 samples"),
    ((0, 1, {"data": [{"batch": "x", "samples": ["a", "b"]}]}), "step 1, rank 1 (before any stop)", "not seeded"),
    ((2, 5, {"loss": 9.0}), "step 5, rank 1 (resumed at step 4)", "the model has state that is not in the checkpoint"),
    ((0, 2, {"loss": 9.0}), "step 2, rank 1 (before any stop)", "the model is not deterministic"),
    ((1, 4, {"lr": [0.2]}), "step 4, rank 1 (resumed at step 2)", "the learning rate is 0.2 instead of 0.1"),
    ((1, 2, {"lr": [0.2]}), "step 2, rank 1 (resumed at step 2)", "right after loading, the learning rate"),
    ((2, 6, {"loss_scale": 4.0}), "step 6, rank 1", "the loss scale is 4 instead of 1"),
    ((2, 6, {"parameters": {"w": "w6", "b": "?"}}), "step 6, rank 1", "b differs after the step"),
    ((1, 2, {"parameters": {"w": "w2", "b": "?"}}), "step 2, rank 1", "right after loading, b is not what was saved"),
    ((1, 2, {"moments": {}}), "step 2, rank 1", "the optimizer's state of w.exp_avg is not what was saved"),
    ((1, 4, {"moments": {"w.exp_avg": "?"}}), "step 4, rank 1", "the optimizer's state of w.exp_avg differs"),
]


@pytest.mark.parametrize(("change", "where", "why"), DIFFERENCES)
def test_the_first_difference(change, where, why):
    part, step, changes = change
    told = first_difference(*traces(part, step, **changes))
    assert told is not None
    assert told.startswith(where)
    assert why in told


def test_equal_traces_and_what_was_not_restored():
    assert first_difference(*traces(0, 1)) is None
    straight, parts = traces(1, 3, loss=5.0)
    parts[1][1][0] = line(2, attributes={"the model": {"num_calls": "0"}}, said=["Converted: 1 tensors."])
    told = first_difference(straight, parts)
    assert told is not None
    assert "not restored: num_calls of the model" in told
    assert "Loading said: Converted: 1 tensors." in told
