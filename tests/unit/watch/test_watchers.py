"""Watchers with made-up reports: what they write, and that none of them can stop a run."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.contracts import StepReport, Watcher
from engine.watch import Summary, WatcherList, build_watchers
from engine.watch.csv import CsvMonitor
from engine.watch.metrics_file import MetricsFile, last_metrics
from engine.watch.progress import Progress, duration
from engine.watch.scalars import StepClock, evaluation_scalars, step_scalars
from engine.watch.summary import Counters, write_json
from engine.watch.timers import Timers
from engine.watch.wandb import wandb_mode


def report(step: int, **changes: Any) -> StepReport:
    base = StepReport(
        step=step,
        applied=True,
        loss=2.5,
        lr=1e-3,
        grad_norm=0.5,
        loss_scale=1.0,
        samples=24 * step,
        tokens_seen=768 * step,
        tokens_computed=768 * step,
        skipped_steps=0,
        seconds={"total": 0.5},
    )
    return replace(base, **changes)


def fake_plan(**sections: Any) -> Any:
    names = ("tensorboard", "wandb", "csv_monitor", "steps_per_print", "training")
    config = SimpleNamespace(**(dict.fromkeys(names) | {"wall_clock_breakdown": False} | sections))
    return SimpleNamespace(config=config, precision=SimpleNamespace(compute="fp32"), values=())


class Failing(Watcher):
    def __init__(self) -> None:
        self.closed = 0

    def on_step(self, report: StepReport) -> None:
        raise OSError("disk full")

    def close(self) -> None:
        self.closed += 1


class Recorder(Watcher):
    def __init__(self) -> None:
        self.events: list[tuple[str, float, int]] = []
        self.steps: list[int] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report.step)

    def write_events(self, events: Any) -> None:
        self.events.extend(events)


def test_a_failing_watcher_is_told_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    failing, recorder = Failing(), Recorder()
    watchers = WatcherList([failing, recorder])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            watchers.on_step(report(step))
    assert recorder.steps == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "Failing failed in on_step of step 1 and is left out from here on; training continues. OSError: disk full"
    ]
    assert failing.closed == 1
    assert list(watchers) == [recorder]


def test_user_events_reach_every_watcher() -> None:
    first, second = Recorder(), Recorder()
    WatcherList([first, WatcherList([second])]).write_events([("mine", 1.0, 7)])
    assert first.events == second.events == [("mine", 1.0, 7)]


def test_scalar_names_and_x_axis() -> None:
    sent = {"dp_shard": 32, "world": 1}
    assert step_scalars(report(2, bytes_by_axis=sent), 100.0, fp16=False) == [
        ("Train/Samples/lr", 1e-3, 48),
        ("Train/Samples/train_loss", 2.5, 48),
        ("Train/grad_norm", 0.5, 48),
        ("Train/tokens_per_second", 100.0, 48),
        ("Comm/bytes_per_step", 33, 48),
        ("Train/tokens", 1536, 48),
    ]
    scaled = step_scalars(report(2, loss_scale=1024.0, loss=None), 100.0, fp16=True)
    assert ("Train/Samples/loss_scale", 1024.0, 48) in scaled
    assert "Train/Samples/train_loss" not in [name for name, _, _ in scaled]
    assert evaluation_scalars(report(2), {"eval_loss": 3.0, "a/b": 1.0}) == [
        ("Train/Samples/eval_loss", 3.0, 48),
        ("a/b", 1.0, 48),
    ]


def test_what_a_curriculum_and_dropping_do_is_told() -> None:
    told = step_scalars(report(2, difficulties={"seqlen": 16.0}, tokens_computed=1000, layers_skipped=3), 1.0, False)
    assert told[-3:] == [
        ("Train/difficulty/seqlen", 16.0, 48),
        ("Train/tokens_computed", 1000, 48),
        ("Train/layers_skipped", 3, 48),
    ]


def test_clock_takes_the_tokens_of_one_step_also_after_a_resume() -> None:
    clock = StepClock()
    assert clock.measure(report(11)) == (0.5, 1536.0)
    assert clock.measure(report(12, tokens_seen=768 * 12 + 768)) == (0.5, 3072.0)


def test_csv_writes_the_header_once(tmp_path: Path) -> None:
    for step in (1, 2):
        monitor = CsvMonitor(tmp_path / "job")
        monitor.on_start(fake_plan())
        monitor.on_step(report(step))
        monitor.close()
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text() == "step,lr\n24,0.001\n48,0.001\n"
    assert {path.name for path in (tmp_path / "job").iterdir()} == {
        "Comm_bytes_per_step.csv",
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
        "Train_grad_norm.csv",
        "Train_tokens_per_second.csv",
        "Train_tokens.csv",
    }


def test_metrics_file_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.on_step(report(1, bytes_by_axis={"dp_shard": 32, "world": 1}))
    metrics.on_step(report(2, applied=False, grad_norm=float("inf"), loss=float("nan")))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "step": 1,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "loss_scale": 1.0,
        "tokens_per_second": 1536.0,
        "samples": 24,
        "tokens": 768,
        "tokens_computed": 768,
        "layers_skipped": 0,
        "skipped_steps": 0,
        "skipped": False,
        "seconds": 0.5,
        "comm_bytes": 33,
    }
    assert (lines[1]["skipped"], lines[1]["grad_norm"], lines[1]["loss"]) == (True, None, None)


@pytest.mark.parametrize(
    ("resumed_step", "tail", "expected"),
    [
        (4, "", [1, 2, 3, 4]),
        (3, "", [1, 2, 3]),
        (6, "", [1, 2, 3, 4, 5, 6]),
        (6, '{"step": 6, "lo', [1, 2, 3, 4, 5, 6]),
        (1, "", [1]),
    ],
)
def test_metrics_file_is_cut_back_to_the_resumed_step(
    tmp_path: Path, resumed_step: int, tail: str, expected: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 6):
        first.on_step(report(step))
    first.close()
    with path.open("a") as file:
        file.write(tail)
    resumed = MetricsFile(path)
    resumed.on_step(report(resumed_step))
    resumed.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == expected
    last = last_metrics(path)
    assert last is not None
    assert last["step"] == expected[-1]


def test_last_metrics_of_nothing(tmp_path: Path) -> None:
    assert last_metrics(tmp_path / "metrics.jsonl") is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    assert last_metrics(tmp_path / "metrics.jsonl") is None


def test_progress_without_a_terminal_prints_lines() -> None:
    stream = io.StringIO()
    progress = Progress(total_steps=4, steps_per_print=2, stream=stream)
    for step in range(1, 5):
        progress.on_step(report(step))
    progress.on_evaluation(report(4), {"eval_loss": 2.25})
    assert stream.getvalue().splitlines() == [
        "step 2/4: loss 2.5000 | lr 0.001 | grad norm 0.5 | 1,536 tokens/s | ETA 00:01",
        "step 4/4: loss 2.5000 | lr 0.001 | grad norm 0.5 | 1,536 tokens/s | ETA 00:00",
        "step 4: eval loss 2.2500",
    ]


def test_progress_prints_the_last_step_and_waits_about_ten_seconds_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("engine.watch.progress.time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(total_steps=6, steps_per_print=None, stream=stream)
    for step in range(1, 7):
        now += 4.0
        progress.on_step(report(step))
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == ["step 3/6", "step 6/6"]


def test_progress_says_where_a_skipped_step_overflowed() -> None:
    stream = io.StringIO()
    Progress(2, 1, stream).on_step(report(1, applied=False, skipped_steps=1, first_nonfinite=(3, "head.weight")))
    assert "this step was skipped: a gradient in head.weight on rank 3 is not finite" in stream.getvalue()


def test_progress_shows_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(total_steps=4, steps_per_print=None, stream=stream)
    for step in (3, 4):
        progress.on_step(report(step))
    progress.close()
    assert "loss=2.5000" in stream.getvalue()
    assert "4/4" in stream.getvalue()


def test_durations() -> None:
    assert [duration(value) for value in (0.2, 61, 3723)] == ["00:01", "01:01", "1:02:03"]


def test_timers_feed_the_monitors_and_print_means() -> None:
    sink, stream = Recorder(), io.StringIO()
    timers = Timers(sink, interval_steps=2, stream=stream)
    timers.on_step(report(1, seconds={"forward": 0.002}))
    timers.on_step(report(2, seconds={"forward": 0.004}))
    assert sink.events == [
        ("Train/Samples/elapsed_time_ms_forward", 2.0, 24),
        ("Train/Samples/elapsed_time_ms_forward", 4.0, 48),
    ]
    assert stream.getvalue() == "step 2: time (ms) | forward 3.00\n"


def test_summary_is_whole_and_plain_json(tmp_path: Path) -> None:
    summary = Summary()
    summary.on_start(fake_plan())
    for step, sent in ((1, 30), (2, 40)):
        summary.on_step(report(step, bytes_by_axis={"dp_shard": sent}))
    summary.on_evaluation(report(2), {"eval_loss": 2.75})
    built = summary.build(
        counters=Counters(steps=2, skipped_steps=1, samples=48, tokens=1536, tokens_computed=1000, layers_skipped=7),
        train_loss=2.5,
        bigram_entropy=2.9,
        world_size=2,
        config_hash="abc",
        peak_memory_bytes_per_rank=[10, 20],
        comm_bytes={"start": 5, "steps": 70},
    )
    write_json(tmp_path / "run" / "summary.json", built)
    read = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert read.pop("seconds") >= 0
    assert read == {
        "train_loss": 2.5,
        "validation_loss": 2.75,
        "bigram_entropy": 2.9,
        "steps": 2,
        "skipped_steps": 1,
        "samples": 48,
        "tokens": 1536,
        "tokens_computed": 1000,
        "layers_skipped": 7,
        "tokens_per_second": 1536.0,
        "comm_bytes_per_step": 35.0,
        "comm_bytes": {"start": 5, "steps": 70},
        "peak_memory_bytes_per_rank": [10, 20],
        "world_size": 2,
        "config_hash": "abc",
    }
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]


def test_a_json_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_only_rank_zero_watches(tmp_path: Path) -> None:
    plan = fake_plan(csv_monitor=SimpleNamespace(enabled=True, output_path="", job_name="job"))
    assert len(build_watchers(plan, tmp_path, rank=1, world_size=2)) == 0
    watchers = build_watchers(plan, tmp_path, rank=0, world_size=2)
    watchers.on_start(plan)
    watchers.on_step(report(1))
    watchers.close()
    assert (tmp_path / "job" / "Train_Samples_lr.csv").exists()
    assert (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_events_carry_samples_and_drop_what_a_resume_repeats(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plan = fake_plan(tensorboard=SimpleNamespace(enabled=True, output_path="tb", job_name="job"))
    for steps in ((1, 2, 3), (2, 3)):
        watchers = build_watchers(plan, tmp_path, rank=0, world_size=1)
        watchers.on_start(plan)
        for step in steps:
            watchers.on_step(report(step))
        watchers.write_events([("mine", 4.0, 72)])
        watchers.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tb" / "job"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("Train/Samples/train_loss")] == [
        (24, 2.5),
        (48, 2.5),
        (72, 2.5),
    ]
    assert [event.value for event in events.Scalars("mine")] == [4.0]


def test_wandb_is_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(keys))
    assert wandb_mode() == "offline"
    keys.write_text("machine api.wandb.ai\n login user\n password secret\n")
    keys.chmod(0o600)
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"
