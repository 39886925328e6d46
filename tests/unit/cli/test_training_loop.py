"""The loop and the end of a run, with an engine that only counts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from engine.checkpoint.errors import CheckpointError
from engine.cli.finish import finish
from engine.cli.sample import logits_of, readable
from engine.cli.train import RunOptions, resume
from engine.cli.training_loop import TrainingLoop, evaluation_batches, steps_of_epochs
from engine.collectives.ledger import Ledger
from engine.contracts import EngineError, PipelineError, RunFailed, StepReport
from engine.data.tokens import TokenBlocks
from engine.launch import StopRequest
from engine.watch import Summary, WatcherList


class CountingEngine:
    """What the loop sees of an engine, written down in `log`."""

    def __init__(self, keep_best: int | None = None, **training: Any) -> None:
        defaults = {
            "steps": None,
            "num_epochs": None,
            "eval_interval": None,
            "eval_batches": None,
            "save_interval": None,
        }
        section = SimpleNamespace(**(defaults | {"sample_length": 5} | training))
        batch = SimpleNamespace(micro_batch_size=2, accumulation_steps=3)
        config = SimpleNamespace(
            training=section,
            data=SimpleNamespace(sequence_length=4),
            checkpoint=SimpleNamespace(keep_best=keep_best, **{"async": False}),
            seed=0,
            hash=lambda: "abc",
        )
        self.plan = SimpleNamespace(config=config, batch=batch)
        self.mesh = SimpleNamespace(
            rank=0, world_size=1, dp_rank=0, dp_size=1, num_slices=1, device=torch.device("cpu")
        )
        self.module: Any = nn.Identity()
        self.log: list[str] = []
        self.last_report: StepReport | None = None
        self.watchers = WatcherList()
        self.global_steps = self.stop_requested = self.skipped_steps = 0
        self.asked = 0
        self.full_disk = False
        self.ledger = Ledger()

    @property
    def global_samples(self) -> int:
        return 6 * self.global_steps

    @property
    def global_tokens(self) -> int:
        return 24 * self.global_steps

    @property
    def tokens_computed(self) -> int:
        return self.global_tokens

    layers_skipped = 0

    def __call__(self, **batch: torch.Tensor) -> Any:
        return self.module(**batch)

    def train_batch_size(self) -> int:
        return 6

    def request_stop(self, number: int) -> None:
        self.asked = number

    def train_batch(self) -> None:
        self.global_steps += 1
        self.stop_requested = self.asked
        self.log.append(f"step {self.global_steps}")
        step = self.global_steps
        self.last_report = StepReport(
            step, True, 1.0 / step, 0.1, 1.0, 1.0, self.global_samples, self.global_tokens, self.global_tokens, 0
        )
        self.watchers.on_step(self.last_report)

    def eval_batch(self, batches: Any, num_micro_batches: int) -> torch.Tensor:
        seen = [tuple(batch["input_ids"].shape) for batch in batches]
        assert seen == [(2, 4)] * num_micro_batches
        self.log.append(f"evaluate {num_micro_batches}")
        return torch.tensor(0.5)

    def save_checkpoint(self, directory: str, metric: float | None = None) -> None:
        self.log.append(f"save {self.global_steps}" + ("" if metric is None else f" at {metric:g}"))
        if self.full_disk:
            raise CheckpointError("no space left on device")

    def wait_for_checkpoint(self) -> None:
        self.log.append("wait")

    def load_checkpoint(
        self, directory: str, tag: str | None, override_batch: bool = False
    ) -> tuple[str | None, dict[str, Any] | None]:
        self.log.append(f"load {Path(directory).name} {tag}")
        if not Path(directory, "global_step2").is_dir():
            return None, None
        self.global_steps = 2
        return f"{directory}/global_step2", {}


def corpus(num_blocks: int = 14) -> Any:
    blocks = TokenBlocks(np.arange(4 * num_blocks + 1, dtype=np.uint8), sequence_length=4)
    return SimpleNamespace(train=blocks, validation=blocks, is_text=True)


def loop(engine: CountingEngine, stop: StopRequest | None = None) -> TrainingLoop:
    return TrainingLoop(engine, corpus(), Path("out/checkpoints"), stop or StopRequest())


def test_trains_evaluates_and_saves_in_order() -> None:
    engine = CountingEngine(steps=5, eval_interval=2, save_interval=3)
    assert loop(engine).run() == 0
    assert engine.log == [
        "step 1", "step 2", "evaluate 6", "step 3", "save 3", "step 4", "evaluate 6", "step 5", "save 5", "wait",
        "evaluate 6",
    ]  # fmt: skip


def test_without_intervals_the_end_is_saved_and_evaluated() -> None:
    engine = CountingEngine(steps=2, eval_batches=1)
    assert loop(engine).run() == 0
    assert engine.log == ["step 1", "step 2", "save 2", "wait", "evaluate 3"]


def test_a_resumed_run_goes_on_where_it_was() -> None:
    engine = CountingEngine(steps=3)
    engine.global_steps = 2
    loop(engine).run()
    assert engine.log == ["step 3", "save 3", "wait", "evaluate 6"]


def test_the_best_are_kept_by_the_loss_of_the_saved_step() -> None:
    engine = CountingEngine(keep_best=1, steps=4, eval_interval=3, save_interval=2)
    loop(engine).run()
    assert engine.log == [
        "step 1", "step 2", "evaluate 6", "save 2 at 0.5", "step 3", "evaluate 6",
        "step 4", "evaluate 6", "save 4 at 0.5", "wait",
    ]  # fmt: skip


def test_a_failed_save_is_told_and_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    engine = CountingEngine(steps=3, save_interval=2)
    engine.full_disk = True
    running = loop(engine)
    assert running.run() == 0
    assert engine.log == ["step 1", "step 2", "save 2", "step 3", "save 3", "evaluate 6"]
    assert "step 2: the checkpoint is not saved, training goes on: no space left" in caplog.text
    with pytest.raises(RunFailed, match="step 3: the run is at its end, but its state is not saved"):
        running.check_saved()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_stop_finishes_the_step_and_saves(
    number: signal.Signals, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, stop = CountingEngine(steps=9), StopRequest()
    stop.signal = number
    assert loop(engine, stop).run() == 128 + number
    assert engine.log == ["step 1", "save 1", "wait"]
    assert capsys.readouterr().out == (
        f"stopped by {name} after step 1; saved out/checkpoints/global_step1; resume with --resume auto\n"
    )


def test_another_ranks_stop_counts_too() -> None:
    engine = CountingEngine(steps=9)
    engine.asked = signal.SIGTERM
    assert loop(engine).run() == 143


def test_epochs_become_steps() -> None:
    engine = CountingEngine(num_epochs=1.5)
    assert loop(engine).num_steps == 3
    assert steps_of_epochs(0.01, corpus().train, engine) == 1


def test_ranks_share_the_held_out_samples_without_overlap() -> None:
    blocks = corpus(14).validation
    alone = [batch["input_ids"] for batch in evaluation_batches(blocks, 6, 2, dp_rank=0, dp_size=1)]
    shared = [
        [batch["input_ids"] for batch in evaluation_batches(blocks, 3, 2, dp_rank=rank, dp_size=2)] for rank in (0, 1)
    ]
    assert torch.equal(torch.cat(alone), torch.cat([part for pair in zip(*shared, strict=True) for part in pair]))
    assert len(torch.unique(torch.cat(alone), dim=0)) == 12


def test_a_small_held_out_set_starts_over() -> None:
    batches = list(evaluation_batches(corpus(3).validation, 2, 2, dp_rank=1, dp_size=2))
    assert [batch["input_ids"][0, 0].item() for batch in batches] == [8, 0]


def options(output: Path, resumed: str | None) -> RunOptions:
    return RunOptions(config=SimpleNamespace(), output=output, resume=resumed)  # type: ignore[arg-type]


def test_resume_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = CountingEngine(steps=3)
    resume(engine, options(tmp_path, "auto"), say=True)
    assert engine.log == []
    assert "no checkpoint" in capsys.readouterr().out
    (tmp_path / "checkpoints" / "global_step2").mkdir(parents=True)
    resume(engine, options(tmp_path, None), say=True)
    assert engine.log == []
    assert "holds an earlier run" in capsys.readouterr().out
    resume(engine, options(tmp_path, "auto"), say=True)
    assert (engine.log, engine.global_steps) == (["load checkpoints None"], 2)
    assert "at step 2" in capsys.readouterr().out


def test_resume_from_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="there is no checkpoint in"):
        resume(CountingEngine(steps=3), options(tmp_path, str(tmp_path)), say=True)


class Writer(nn.Module):
    """Its next token follows from the last one alone: the two bytes of `é`, then an `x`, over and over.

    So a sample may end inside a character.
    """

    NEXT: ClassVar[dict[int, int]] = {ord("\n"): 0xC3, 0xC3: 0xA9, 0xA9: ord("x"), ord("x"): 0xC3}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert not self.training
        assert input_ids.shape[1] <= 4, "the context is data.sequence_length"
        logits = torch.full((*input_ids.shape, 300), -torch.inf)
        logits[0, -1, self.NEXT[int(input_ids[0, -1])]] = 0.0
        logits[0, -1, 256:] = 1000.0
        return logits


def test_finish_writes_the_summary_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, summary = CountingEngine(steps=2), Summary()
    engine.module = Writer()
    engine.watchers.append(summary)
    loop(engine).run()
    finish(engine, corpus(), summary, tmp_path)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["train_loss"], written["validation_loss"], written["steps"]) == (0.5, 0.5, 2)
    assert written["peak_memory_bytes_per_rank"][0] > 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(
        "step 2: train loss 0.5000 | validation loss 0.5000 | bigram entropy 0.0000 (nats per token)"
    )
    assert out[-2:] == ["a sample of 5 characters:", "éxéx\N{REPLACEMENT CHARACTER}"]
    assert engine.module.training


def test_the_train_loss_of_a_finished_run_is_read_from_its_metrics(tmp_path: Path) -> None:
    engine = CountingEngine(steps=2)
    engine.global_steps = 2
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    finish(engine, corpus(), Summary(), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["train_loss"] == 2.0


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (RuntimeError("weights are NaN"), "no sample: RuntimeError: weights are NaN"),
        (
            PipelineError("train_batch() runs a whole window"),
            "no sample: under a pipeline no rank has the whole model;",
        ),
        (torch.ones(3), "the model returned a tensor of shape (3,), which holds no logits"),
    ],
)
def test_a_model_that_cannot_write_has_no_sample(
    output: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            if isinstance(output, Exception):
                raise output
            return output

    engine = CountingEngine(steps=2)
    engine.module = Broken()
    finish(engine, corpus(), Summary(), tmp_path)
    assert words in capsys.readouterr().out
    assert (tmp_path / "summary.json").exists()


def test_where_logits_are() -> None:
    logits = torch.ones(1, 2, 3)
    assert all(logits_of(output) is logits for output in (logits, {"logits": logits}, SimpleNamespace(logits=logits)))


def test_a_sample_cannot_move_the_cursor() -> None:
    assert readable(b"a\x1b[2J\n\tb\xff") == "a\N{REPLACEMENT CHARACTER}[2J\n\tb\N{REPLACEMENT CHARACTER}"
