"""`ptrain analyze`, `plot-schedule` and `lr-range`, on small configs."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cli import pictures
from engine.cli.lr_range import range_test
from engine.cli.main import main
from engine.cli.plot_schedule import schedule_curves
from engine.cli.range_curve import RangeCurve
from engine.config import load_config
from engine.contracts import EngineError
from engine.data.difficulty_index import MetricIndex
from engine.launch.outcome import FAILURE_DIRECTORY
from engine.plan import plan
from engine.plan.layer_drop import theta_at
from tests.harness import REPOSITORY

PNG = b"\x89PNG\r\n\x1a\n"
MODEL = """
import torch
from torch import nn


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(256, 256)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten())


def spaces(samples):
    return [(sample["input_ids"] == 32).sum() for sample in samples]
"""
CURRICULUM = {
    "enabled": True, "min_difficulty": 4, "max_difficulty": 16, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", FAILURE_DIRECTORY):
        monkeypatch.delenv(name, raising=False)


def write_config(folder: Path, **more: Any) -> Path:
    (folder / "bigram.py").write_text(MODEL)
    (folder / "text.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 40)
    config = {
        "train_batch_size": 4,
        "model": {"target": "bigram.py:Bigram"},
        "data": {"path": "text.txt", "sequence_length": 16},
        "training": {"steps": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **more,
    }
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return path


def drawing(**metrics: Any) -> dict[str, Any]:
    section = {"enabled": True, "data_cluster_path": "index", "curriculum_metrics": metrics}
    return {"data_efficiency": {"data_sampling": {"curriculum_learning": section}}}


METRIC = {
    "difficulty_type": "percentile", "min_difficulty": 5, "max_difficulty": 10, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1},
}  # fmt: skip


def test_analyze_then_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(
        tmp_path, **drawing(vocabularyrarity=METRIC, spaces={**METRIC, "function": "bigram.py:spaces"})
    )
    output = str(tmp_path / "out")
    assert main(["--config", str(config), "--output", output]) == 2
    assert "there is no index of the data" in capsys.readouterr().err
    assert main(["analyze", str(config)]) == 0
    told = capsys.readouterr().out
    assert "vocabularyrarity: " in told
    assert "spaces: " in told
    for name in ("vocabularyrarity", "spaces"):
        assert (tmp_path / "index" / name / "histogram.png").read_bytes().startswith(PNG)
    spaces = MetricIndex(tmp_path / "index" / "spaces", "spaces")
    text = (tmp_path / "text.txt").read_bytes()
    assert spaces.sample_to_metric[:5].tolist() == [text[16 * i : 16 * i + 16].count(b" ") for i in range(5)]
    assert main(["--config", str(config), "--output", output, "--set", "training.steps=4"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["difficulty_spaces"] for line in lines] == [5, 6, 6, 7]
    with (tmp_path / "text.txt").open("a") as file:
        file.write("another text" * 50)
    capsys.readouterr()
    assert main(["--config", str(config), "--output", output]) == 2
    assert "is of another data set" in capsys.readouterr().err


def test_worker_processes_do_not_run_the_command_again() -> None:
    """What multiprocessing does with the main script in every process that it starts."""
    runpy.run_path(str(REPOSITORY / "bin" / "ptrain"), run_name="__mp_main__")


def test_analyze_without_a_curriculum_measures_what_is_built_in(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["analyze", str(config), "--output", str(tmp_path / "found"), "--workers", "2"]) == 0
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"index.json", "seqlen", "vocabularyrarity"}
    assert main(["analyze", str(config), "--output", str(tmp_path / "one"), "--metric", "seqlen"]) == 0
    lengths = np.load(tmp_path / "one" / "seqlen" / "sample_to_metric.npy")
    assert set(lengths.tolist()) == {16}


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (["--metric", "rarety"], {}, "there is no metric 'rarety'"),
        ([], drawing(own={**METRIC, "function": "bigram.py:gaps"}), "curriculum_metrics.own.function 'bigram.py:gaps'"),
        ([], drawing(own=METRIC), "there is no metric 'own'"),
    ],
)
def test_analyze_refuses(
    arguments: list[str], more: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(write_config(tmp_path, **more)), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_plot_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 5},
    }
    config = write_config(tmp_path, scheduler=scheduler, curriculum_learning=CURRICULUM)
    picture = tmp_path / "pictures" / "schedule.png"
    assert main(["plot-schedule", str(config), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(PNG)
    told = capsys.readouterr().out
    for name in ("lr: ", "momentum: ", "batch, samples: ", "batch, tokens: ", "seqlen: "):
        assert name in told
    made = plan(load_config(str(config)))
    curves = schedule_curves(made, 20)
    assert curves["lr"][:7] == pytest.approx([1e-4 + 9e-4 * f for f in (0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.8)])
    assert curves["momentum"][:7] == pytest.approx([0.9 - 0.1 * f for f in (0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.8)])
    lengths = [max(4, min(16, (4 + step * 12 // 10) // 4 * 4)) for step in range(1, 21)]
    assert curves["seqlen"] == lengths
    assert curves["batch, tokens"] == [4 * length for length in lengths]
    assert curves["batch, samples"] == [4.0] * 20


def test_what_is_plotted_is_what_is_trained(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_tokens": 700, "warmup_num_steps": 4}}
    config = write_config(tmp_path, scheduler=scheduler, curriculum_learning=CURRICULUM)
    assert main(["--config", str(config), "--output", str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    curves = schedule_curves(plan(load_config(str(config))), 20)
    assert [line["lr"] for line in lines] == curves["lr"]
    assert [line["difficulty_seqlen"] for line in lines] == curves["seqlen"]
    assert np.diff([0] + [line["tokens"] for line in lines]).tolist() == curves["batch, tokens"]
    assert lines[-1]["lr"] < 1e-4 < max(curves["lr"])


def test_theta_is_drawn(tmp_path: Path) -> None:
    drop = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    made = plan(load_config(str(write_config(tmp_path, progressive_layer_drop=drop))))
    assert schedule_curves(made, 20)["theta"] == [theta_at(step, 0.5, 0.1) for step in range(20)]
    theirs = plan(load_config(str(write_config(tmp_path, progressive_layer_drop={**drop, "compat": "deepspeed"}))))
    assert schedule_curves(theirs, 4)["theta"] == [theta_at(step, 0.5, 0.1) for step in (0, 0, 1, 2)]


def test_kept_tokens_are_drawn(tmp_path: Path) -> None:
    schedule = {"min_value": 8, "max_value": 64, "schedule_config": {"require_steps": 7, "seq_per_step": 8}}
    drop = {"enabled": True, "random_ltd_schedule": schedule}
    config = write_config(tmp_path, data_efficiency={"data_routing": {"random_ltd": drop}})
    made = plan(load_config(str(config)))
    length = made.config.data.sequence_length
    assert schedule_curves(made, 9)["kept tokens"] == [min(8.0 * step, length) for step in (1, 2, 3, 4, 5, 6, 7, 8, 8)]


def test_theta() -> None:
    assert [round(theta_at(step, 0.5, 0.001), 6) for step in (0, 100, 1000, 5000)] == [1.0, 0.952419, 0.68394, 0.503369]


def test_plot_schedule_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, training={}))
    assert main(["plot-schedule", config, "--output", str(tmp_path / "a.txt")]) == 2
    assert "no picture; name a file that ends in .png" in capsys.readouterr().err
    assert main(["plot-schedule", config, "--output", str(tmp_path / "a.png")]) == 2
    assert "how many steps there are is not known; pass --steps N" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not pictures.have_matplotlib()
    assert main(["plot-schedule", config, "--steps", "5"]) == 2
    assert "pip install 'ptrain-engine[plot]'" in capsys.readouterr().err


# --- the range test -----------------------------------------------------------------------------------------------


def test_lr_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_clipping=0.0)
    output = tmp_path / "out"
    arguments = ["--steps", "60", "--min-lr", "1e-3", "--max-lr", "1e6", "--output", str(output)]
    assert main(["lr-range", str(config), *arguments]) == 0
    told = capsys.readouterr().out
    assert "diverged at lr" in told
    assert "suggested: lr from" in told
    found = json.loads((output / "lr_range.json").read_text())
    assert found["steps"] < 60
    assert found["lr"][0] == pytest.approx(1e-3)
    assert found["lr"][10] == pytest.approx(1e-3 * 10 ** (9 * 10 / 59))
    assert 1e-3 < found["suggested_min_lr"] <= found["suggested_max_lr"] < found["lr"][-1] / 10
    assert found["lr_of_steepest_descent"] < found["lr_of_minimum"]
    assert (output / "lr_range.png").read_bytes().startswith(PNG)
    assert {path.name for path in output.iterdir()} == {"lr_range.png", "lr_range.json"}


def test_lr_range_takes_the_configs_own_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    config = write_config(tmp_path, scheduler={"type": "LRRangeTest", "params": params})
    assert main(["lr-range", str(config), "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "lr_range.json").read_text())
    assert found["lr"] == pytest.approx([0.01 * (1 + 2 * step / 4) for step in range(20)])
    capsys.readouterr()
    assert main(["lr-range", str(config), "--max-lr", "1"]) == 2
    assert "the config has its own LRRangeTest" in capsys.readouterr().err


def test_a_range_that_is_none_is_refused() -> None:
    config = load_config({"train_batch_size": 1})
    for steps, low, high in ((100, 1.0, 0.1), (5, None, None), (100, -1.0, None)):
        with pytest.raises(EngineError, match="a range test goes from"):
            range_test(config, steps, low, high)


def valley(num_steps: int = 100, noise: float = 0.0) -> RangeCurve:
    """Flat to 1e-4, steepest at 1e-3, lowest at 1e-2, exploding behind 0.1."""
    curve, random = RangeCurve(), np.random.default_rng(0)
    for lr in np.logspace(-6, 1, num_steps):
        place = math.log10(lr)
        loss = 5.0 - 2.0 / (1.0 + math.exp(-4.0 * (place + 3.0))) + 0.1 * (place + 2.0) ** 2 * (place > -2.0)
        loss += 3.0 * max(0.0, place + 1.0) ** 2
        curve.add(float(lr), loss + noise * random.standard_normal())
        if curve.stopped:
            break
    return curve


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_range_lies_between_the_steepest_descent_and_a_tenth_of_the_minimum(noise: float) -> None:
    curve = valley(noise=noise)
    assert "diverged" in curve.stopped
    suggested = curve.suggested()
    assert suggested is not None
    low, high = suggested
    steepest, lowest = curve.steepest(), curve.lowest()
    assert steepest is not None
    assert lowest is not None
    assert 10**-3.4 < curve.lrs[steepest] < 10**-2.6
    assert 10**-2.4 < curve.lrs[lowest] < 10**-1.4
    assert (low, high) == tuple(sorted((curve.lrs[steepest], curve.lrs[lowest] / 10)))


def test_the_smoothed_loss_is_a_weighted_mean_of_both_sides() -> None:
    curve = RangeCurve()
    losses = [5.0, 4.0, 4.5, 3.0, 3.5, 2.0, 2.5, 1.5, 1.6, 1.7]
    for step, loss in enumerate(losses):
        curve.add(10.0**step, loss)
    for place, value in enumerate(curve.smoothed):
        weights = {other: 5 - abs(other - place) for other in range(10) if abs(other - place) < 5}
        expected = sum(losses[other] * weight for other, weight in weights.items()) / sum(weights.values())
        assert value == pytest.approx(expected)


def test_a_loss_that_is_not_finite_ends_the_test() -> None:
    curve = RangeCurve()
    for lr, loss in ((0.1, 5.0), (0.2, 4.0), (0.4, float("nan"))):
        curve.add(lr, loss)
    assert curve.stopped == "the loss is not finite at lr 0.4"
    assert curve.losses == [5.0, 4.0]


def test_a_loss_that_never_falls_gives_no_suggestion() -> None:
    curve = RangeCurve()
    for step in range(20):
        curve.add(1e-3 * 2**step, 5.0 + 0.01 * step)
    assert curve.suggested() is None
    assert "no suggestion: the loss never fell" in curve.told()
    assert curve.result(20)["suggested_min_lr"] is None
