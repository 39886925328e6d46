"""What a run prints and leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.jobs.conftest import Arguments
from tests.jobs.job import ROOT, SMALL, Finished, column, metrics, run, settings, summary

METRIC_KEYS = [
    "step",
    "loss",
    "lr",
    "grad_norm",
    "loss_scale",
    "tokens_per_second",
    "samples",
    "tokens",
    "tokens_computed",
    "layers_skipped",
    "skipped_steps",
    "skipped",
    "seconds",
    "comm_bytes",
]
SUMMARY_KEYS = {
    "train_loss",
    "validation_loss",
    "bigram_entropy",
    "steps",
    "skipped_steps",
    "samples",
    "tokens",
    "tokens_computed",
    "layers_skipped",
    "seconds",
    "tokens_per_second",
    "comm_bytes_per_step",
    "comm_bytes",
    "peak_memory_bytes_per_rank",
    "world_size",
    "config_hash",
}


def test_the_run_prints_plan_progress_and_sample(whole_run: tuple[Path, Finished]) -> None:
    output, finished = whole_run
    assert finished.code == 0, finished.err
    assert finished.out.startswith("world ")
    assert "step 12/12: loss " in finished.err
    assert "step 6: eval loss " in finished.err
    assert f"written to {output}" in finished.out
    _, sample = finished.out.split("a sample of 40 characters:\n")
    assert len(sample.removesuffix("\n")) == 40


def test_metrics(whole_run: tuple[Path, Finished]) -> None:
    output, _ = whole_run
    lines = metrics(output)
    assert [list(line) for line in lines] == [METRIC_KEYS] * 12
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["samples"] for line in lines] == [12 * step for step in range(1, 13)]
    assert [line["tokens"] for line in lines] == [12 * 32 * step for step in range(1, 13)]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert not any(line["skipped"] for line in lines)
    assert all(line["tokens_per_second"] == pytest.approx(12 * 32 / line["seconds"]) for line in lines)


def test_summary(whole_run: tuple[Path, Finished]) -> None:
    output, _ = whole_run
    found = summary(output)
    assert set(found) == SUMMARY_KEYS
    assert found["train_loss"] == metrics(output)[-1]["loss"]
    assert (found["steps"], found["samples"], found["tokens"]) == (12, 144, 12 * 12 * 32)
    assert 0 < found["bigram_entropy"] < found["validation_loss"]
    assert found["world_size"] == 1
    assert all(peak > 1 << 26 for peak in found["peak_memory_bytes_per_rank"])


def test_tensorboard_has_the_curves(whole_run: tuple[Path, Finished]) -> None:
    output, _ = whole_run
    events = EventAccumulator(str(output / "tensorboard" / "gpt_text"))
    events.Reload()
    losses = events.Scalars("Train/Samples/train_loss")
    assert [event.step for event in losses] == column(output, "samples")
    assert [event.value for event in losses] == pytest.approx(column(output, "loss"), rel=1e-6)
    assert [event.step for event in events.Scalars("Train/Samples/eval_loss")] == [72, 144]
    assert {"Train/Samples/lr", "Train/grad_norm", "Train/tokens_per_second"} <= set(events.Tags()["scalars"])


def test_checkpoints_lie_at_every_interval_and_at_the_end(whole_run: tuple[Path, Finished]) -> None:
    output, _ = whole_run
    checkpoints = output / "checkpoints"
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"global_step5", "global_step10", "global_step12", "latest"}
    assert (checkpoints / "latest").read_text().strip() == "global_step12"


def test_nothing_else_is_written(whole_run: tuple[Path, Finished]) -> None:
    output, _ = whole_run
    written = {"checkpoints", "config.resolved.json", "metrics.jsonl", "summary.json", "tensorboard"}
    assert {path.name for path in output.iterdir()} == written


def test_the_resolved_config_repeats_the_run(whole_run: tuple[Path, Finished], tmp_path: Path) -> None:
    expected, _ = whole_run
    output = tmp_path / "output"
    finished = run(["--config", str(expected / "config.resolved.json"), "--output", str(output)], cwd=tmp_path)
    assert finished.code == 0, finished.err
    for key in ("loss", "lr", "grad_norm", "samples", "tokens"):
        assert column(output, key) == column(expected, key)
    again, before = (json.loads((folder / "config.resolved.json").read_text()) for folder in (output, expected))
    assert again == before


def test_the_output_is_named_after_the_config(text: Path, tmp_path: Path) -> None:
    example = json.loads((ROOT / "examples" / "gpt_text" / "config.json").read_text())
    example["model"]["target"] = f"{ROOT / 'examples/gpt_text/model.py'}:GPT"
    (tmp_path / "my_run.json").write_text(json.dumps(example))
    few = SMALL | {"data.path": str(text), "training.steps": 1, "training.sample_length": 0}
    finished = run(["--config", "my_run.json", *settings(few)], cwd=tmp_path)
    assert finished.code == 0, finished.err
    assert (tmp_path / "output" / "my_run" / "summary.json").exists()
    assert "a sample of" not in finished.out


def test_token_files_train_too(small: Arguments, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(b"".join((index * index % 300).to_bytes(2, "little") for index in range(20000)))
    output = tmp_path / "output"
    changes = {"data.path": str(tokens), "model.args.vocabulary_size": 300, "training.steps": 3}
    finished = run(small(output, changes, "--nproc", "2"))
    assert finished.code == 0, finished.err
    assert "a sample of" not in finished.out, "token ids are no text"
    assert summary(output)["bigram_entropy"] > 0
