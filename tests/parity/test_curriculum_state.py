"""What a curriculum counts, what the learning rate and a resumed run follow, and drawing by difficulty."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import engine
from engine.contracts import EngineError
from engine.data.analysis import analyze
from engine.data.difficulty import Metric
from tests.parity.runs import config_of
from tests.parity.test_curriculum import LENGTHS, SMALL, STEPS, WORLD, curriculum
from tests.parity.test_precision import Poisoned
from tests.parity.toy import toy_batch, toy_model


def step_of(model_engine: engine.Engine, step: int, poisoned: bool = False) -> engine.StepReport:
    loss = model_engine(**toy_batch(step))
    model_engine.backward(Poisoned.apply(loss) if poisoned else loss)
    model_engine.step()
    assert model_engine.last_report is not None
    return model_engine.last_report


def test_difficulty_follows_applied_steps_and_tokens_follow_what_was_seen() -> None:
    model_engine, *_ = engine.initialize(model=toy_model(**SMALL), config=config_of(stage=0, **curriculum()))
    reports = [step_of(model_engine, step, poisoned=step == 1) for step in range(5)]
    lengths = [8, 16, 16, 24, 32]
    assert [report.difficulties["seqlen"] for report in reports] == lengths
    assert [report.tokens_seen for report in reports] == np.cumsum([24 * size for size in lengths]).tolist()
    assert [report.skipped_steps for report in reports] == [0, 1, 1, 1, 1]
    assert model_engine.curriculum_difficulties() == {"seqlen": 32.0}
    model_engine.destroy()


def test_the_learning_rate_decays_by_the_tokens_seen() -> None:
    total = 24 * (8 + 16 + 24 + 32 + 32 + 32)
    schedule = {
        "type": "WarmupCosineLR",
        "params": {"total_num_tokens": total, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.0},
    }
    model_engine, *_ = engine.initialize(
        model=toy_model(**SMALL), config=config_of(stage=0, scheduler=schedule, **curriculum())
    )
    rates = [step_of(model_engine, step).lr for step in range(STEPS)] + [model_engine.get_lr()[0]]
    seen = np.cumsum([24 * size for size in LENGTHS])
    start = seen[1]
    decay = [1e-3 * (1 + np.cos(np.pi * (tokens - start) / (total - start))) / 2 for tokens in seen[2:]]
    assert rates == pytest.approx([0.0, 0.0, 0.5e-3, *decay], abs=1e-12)
    model_engine.destroy()


def test_a_custom_schedule() -> None:
    section = {**curriculum()["curriculum_learning"], "schedule_type": "custom", "schedule_config": {}}
    model_engine, *_ = engine.initialize(
        model=toy_model(**SMALL), config=config_of(stage=0, curriculum_learning=section)
    )
    with pytest.raises(EngineError, match=r"engine\.set_custom_curriculum_learning_schedule"):
        model_engine(**toy_batch(0))
    with pytest.raises(EngineError, match=r"'length' is no metric .*those are: seqlen"):
        model_engine.set_custom_curriculum_learning_schedule({"length": lambda step: 8})
    model_engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 10 + step})
    assert [step_of(model_engine, step).difficulties["seqlen"] for step in range(3)] == [11, 12, 13]
    model_engine.destroy()
    plain, *_ = engine.initialize(model=toy_model(**SMALL), config=config_of(stage=0))
    with pytest.raises(EngineError, match="switches no curriculum on"):
        plain.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 8})
    plain.destroy()


def test_a_resumed_run_is_as_far_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def start(**changes: Any) -> engine.Engine:
        config = config_of(stage=0, **curriculum(steps=6, **changes))
        return engine.initialize(model=toy_model(**SMALL), config=config)[0]

    whole = start()
    reports = [step_of(whole, step) for step in range(2)]
    whole.save_checkpoint(str(tmp_path))
    reports += [step_of(whole, step) for step in range(2, 6)]
    whole.destroy()
    resumed = start()
    resumed.load_checkpoint(str(tmp_path))
    again = [step_of(resumed, step) for step in range(2, 6)]
    assert [(r.loss, r.tokens_seen, r.difficulties) for r in again] == [
        (r.loss, r.tokens_seen, r.difficulties) for r in reports[2:]
    ]
    resumed.destroy()
    faster = start(schedule_config={"total_curriculum_step": 2, "difficulty_step": 8})
    faster.load_checkpoint(str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="engine"):
        step_of(faster, 2)
    assert "saved at seqlen 16; the config's schedule says 32" in caplog.text
    faster.destroy()


def ledger_run(folder: str) -> list[engine.StepReport]:
    """50 steps under a curriculum, some skipped, with layers that write down what they left out."""
    config = config_of(
        stage=0, precision="fp16", accumulation=3, **curriculum("seqlen", steps=40),
        fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 12},
    )  # fmt: skip
    model_engine, *_ = engine.initialize(
        model=toy_model(num_blocks=2, width=16, num_heads=2), config=config, output=folder
    )
    saved = model_engine.roles.saved_work
    reports = []
    for step in range(50):
        for micro in range(3):
            index = micro * WORLD + model_engine.mesh.dp_rank
            rows = {name: value[index * 4 : index * 4 + 4] for name, value in toy_batch(step).items()}
            loss = model_engine(**rows)
            if (step + micro) % 4 == 0:
                saved.skip_layer(100 + model_engine.mesh.rank)
            if micro == 1:
                saved.drop_tokens(7)
            model_engine.backward(Poisoned.apply(loss) if step % 9 == 3 and micro == 0 else loss)
            model_engine.step()
        assert model_engine.last_report is not None
        reports.append(model_engine.last_report)
    model_engine.destroy()
    return reports


@pytest.mark.parametrize("world", [WORLD])
def test_the_ledger_equals_a_recount(ranks: Any, tmp_path: Path, world: int) -> None:
    reports = ranks(world).run(ledger_run, str(tmp_path), timeout=200.0)[0]
    tokens = layers = layer_tokens = skipped = applied = 0
    for step, report in enumerate(reports):
        length = 32 if applied + 1 >= 40 else max(8, (8 + (applied + 1) * 24 // 40) // 8 * 8)
        tokens += 24 * length
        for micro in range(3):
            for rank in range(world):
                if (step + micro) % 4 == 0:
                    layers, layer_tokens = layers + 1, layer_tokens + 100 + rank
                layer_tokens += 7 if micro == 1 else 0
        skipped += step % 9 == 3
        applied += step % 9 != 3
        assert report.difficulties == {"seqlen": float(length)}
        counted = (report.tokens_seen, report.tokens_computed, report.layers_skipped, report.skipped_steps)
        assert counted == (tokens, tokens - layer_tokens // 2, layers, skipped), f"step {step + 1}"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["tokens"], lines[-1]["tokens_computed"]) == (reports[-1].tokens_seen, reports[-1].tokens_computed)
    assert (lines[-1]["layers_skipped"], lines[-1]["skipped_steps"]) == (layers, skipped)
    assert lines[-1]["difficulty_seqlen"] == 32.0


# --- drawing samples --------------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Tensor]]):
    """96 samples of 1 to 32 tokens, padded."""

    def __init__(self) -> None:
        batch = toy_batch(0, 96)
        self.lengths = torch.randint(1, 33, (96,), generator=torch.Generator().manual_seed(0))
        self.masks = (torch.arange(32) < self.lengths[:, None]).long()
        self.batch = {**batch, "number": torch.arange(96)}

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**{name: value[index] for name, value in self.batch.items()}, "attention_mask": self.masks[index]}


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = toy_model(num_blocks=2, width=16, num_heads=2)
        self.seen: list[list[int]] = []

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, number: Tensor) -> Tensor:
        self.seen.append(number.tolist())
        return self.inner(input_ids, labels=labels)


def draw_config(folder: str, low: int = 8) -> dict[str, Any]:
    metric = {
        "min_difficulty": low, "max_difficulty": 32, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1},
    }  # fmt: skip
    section = {"enabled": True, "data_cluster_path": folder, "curriculum_metrics": {"seqlen": metric}}
    return config_of(stage=0, data_efficiency={"data_sampling": {"curriculum_learning": section}})


def draw(folder: str, first: int, last: int) -> list[list[int]]:
    """The sample numbers that this rank saw, step by step; from a checkpoint where ``first`` is not 0."""
    model = Remembers()
    model_engine, *_ = engine.initialize(model=model, config=draw_config(folder), training_data=Sentences())
    if first:
        model_engine.load_checkpoint(f"{folder}/checkpoints")
    for _ in range(first, last):
        model_engine.train_batch()
    if not first:
        model_engine.save_checkpoint(f"{folder}/checkpoints")
    model_engine.destroy()
    return model.seen


def test_drawn_by_difficulty_and_resumed_on_more_ranks(ranks: Any, tmp_path: Path) -> None:
    data = Sentences()
    folder = str(tmp_path)
    analyze(data, [Metric("seqlen")], tmp_path)
    whole = draw(folder, 0, 12)
    for step, numbers in enumerate(whole, 1):
        assert data.lengths[numbers].max() <= min(32, 8 + step * 24 // 10)
    assert len(whole) > 96 // 24, "more than an epoch"
    (tmp_path / "again").mkdir()
    analyze(data, [Metric("seqlen")], tmp_path / "again")
    again = str(tmp_path / "again")
    assert draw(again, 0, 6) == whole[:6]
    halves = ranks(WORLD).run(draw, again, 6, 12, timeout=120.0)
    assert [a + b for a, b in zip(*halves, strict=True)] == whole[6:]


def test_a_difficulty_that_admits_all_from_the_start_changes_nothing(tmp_path: Path) -> None:
    analyze(Sentences(), [Metric("seqlen")], tmp_path)
    seen = []
    for config in (config_of(stage=0), draw_config(str(tmp_path), low=32)):
        model = Remembers()
        model_engine, *_ = engine.initialize(model=model, config=config, training_data=Sentences())
        for _ in range(6):
            model_engine.train_batch()
        seen.append(model.seen)
        assert model_engine.curriculum_difficulties() == ({} if len(seen) == 1 else {"seqlen": 32})
        model_engine.destroy()
    assert seen[0] == seen[1]


def test_an_index_that_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(EngineError, match="no index of the data"):
        draw(folder, 0, 1)
    analyze(Sentences(), [Metric("vocabularyrarity")], tmp_path)
    with pytest.raises(EngineError, match="has no metric 'seqlen'; it has: vocabularyrarity"):
        draw(folder, 0, 1)
    with pytest.raises(EngineError, match="only the engine's own loader"):
        engine.initialize(model=Remembers(), config=draw_config(folder))
