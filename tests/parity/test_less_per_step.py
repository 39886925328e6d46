"""Curriculum, random-LTD, layer drop, accumulation and fp16 with an overflow, together; and their one ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import engine
from engine.cli.main import main
from engine.launch.outcome import FAILURE_DIRECTORY
from tests.parity.compare import assert_equal_to
from tests.parity.layer_drop_oracle import Drop, oracle_run, recount
from tests.parity.runs import Pieces, config_of, pieces_of
from tests.parity.test_precision import Poisoned
from tests.parity.token_drop_oracle import GptOracle, Now
from tests.parity.toy import Result, part, toy_batch, toy_model

WORLD, ACCUMULATION, STEPS, LAYERS = 2, 2, 8, 4
DROP = Drop(theta=0.4, gamma=0.3)
SMALL = {"num_blocks": LAYERS, "width": 32, "num_heads": 2}
SGD = {"lr": 0.1, "momentum": 0.9}
SCALE = 2.0**12


def cut(applied: int, total: int) -> int:
    """The curriculum's length in the step after so many: 8 to 32 tokens in ``total`` steps."""
    return 32 if applied + 1 >= total else max(8, (8 + (applied + 1) * 24 // total) // 8 * 8)


def kept(applied: int, total: int) -> int:
    """How many tokens of a sequence the middle layers keep."""
    return 32 if applied >= total else (8 + applied * 24 // total) // 8 * 8


def together(cut_steps: int, kept_steps: int, drop: Drop = DROP) -> dict[str, Any]:
    paces = {"total_curriculum_step": cut_steps, "difficulty_step": 8}
    lengths = {"min_value": 8, "max_value": 32, "schedule_config": {"require_steps": kept_steps, "seq_per_step": 8}}
    return {
        "curriculum_learning": {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
            "schedule_type": "fixed_linear", "schedule_config": paces,
        },
        "data_efficiency": {"data_routing": {"random_ltd": {"enabled": True, "random_ltd_schedule": lengths}}},
        **drop.section,
    }  # fmt: skip


def run(stage: int, steps: int, poisoned: tuple[int, ...], more: dict[str, Any], model: dict[str, Any]) -> Any:
    """This rank's result, pieces, and the reports of ``steps`` steps."""
    config = config_of(
        stage=stage, precision="fp16", accumulation=ACCUMULATION, optimizer={"type": "SGD", "params": SGD},
        fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 9},
        zero_optimization={"stage": stage, **({"stage3_prefetch_bucket_size": 1} if stage == 3 else {})}, **more,
    )  # fmt: skip
    model_engine, *_ = engine.initialize(model=toy_model(**model), config=config)
    result, reports = Result(), []
    for step in range(steps):
        for micro in range(ACCUMULATION):
            index = micro * WORLD + model_engine.mesh.dp_rank
            loss = model_engine(**part(toy_batch(step), index, WORLD * ACCUMULATION))
            model_engine.backward(Poisoned.apply(loss) if step in poisoned and micro == 1 else loss)
            model_engine.step()
        report = model_engine.last_report
        assert report is not None
        reports.append(report)
        result.losses.append(report.loss or 0.0)
        result.norms.append(report.grad_norm or 0.0)
    pieces = pieces_of(model_engine)
    model_engine.destroy()
    return result, pieces, reports


OVERFLOWS = (3,)


def expected() -> Result:
    now = Now([])
    selecting = GptOracle(nn.Identity(), now)

    def on_tokens(block: nn.Module, hidden: Tensor, layer: int, place: tuple[int, int, int]) -> Tensor:
        step, index, applied = place
        if layer in (1, LAYERS):
            return block(hidden)
        now.step, now.first_sample, now.lengths = step, index * len(hidden), [kept(applied, 12)] * STEPS
        return selecting.on_tokens(block, hidden, layer - 1)

    result = oracle_run(
        toy_model(**SMALL), DROP, steps=STEPS, num_parts=WORLD * ACCUMULATION, dp=WORLD, precision="fp16",
        optimizer="SGD", params=SGD, length=lambda applied: cut(applied, 5), block_of=on_tokens,
        skipped=lambda step: step in OVERFLOWS, scale=SCALE,
    )  # fmt: skip
    result.norms = [0.0 if math.isnan(norm) else norm for norm in result.norms]
    return result


def run_stages() -> list[tuple[Result, Pieces, Any]]:
    return [run(stage, STEPS, OVERFLOWS, together(5, 12), SMALL) for stage in (0, 3)]


def test_all_together_against_one_oracle(ranks: Any) -> None:
    reference = expected()
    counted = recount(
        DROP, steps=STEPS, num_layers=LAYERS, accumulation=ACCUMULATION, dp=WORLD, length=lambda a: cut(a, 5),
        dropped=lambda layer, size, a: 0 if layer in (1, LAYERS) else max(0, size - kept(a, 12)),
        skipped=lambda step: step in OVERFLOWS,
    )  # fmt: skip
    assert counted.layers > 0
    by_rank = ranks(WORLD).run(run_stages, timeout=240.0)
    for number, stage in enumerate((0, 3)):
        results = [rank[number] for rank in by_rank]
        try:
            assert_equal_to(reference, results, losses=2e-3, parameters=2e-3, norms=2e-2)
        except AssertionError as error:
            raise AssertionError(f"stage {stage}: {error}") from error
        for _, _, reports in results:
            told = [(r.tokens_seen, r.tokens_computed, r.layers_skipped, r.skipped_steps) for r in reports]
            assert told == counted.by_step


# --- the ledger ----------------------------------------------------------------------------------------------------

TINY = {"num_blocks": LAYERS, "width": 16, "num_heads": 2}
LEDGER_STEPS = 50
LEDGER_DROP = Drop(theta=0.5, gamma=0.1)


def recount_50(skipped: Any, **split: int) -> Any:
    return recount(
        LEDGER_DROP, steps=LEDGER_STEPS, num_layers=LAYERS, length=lambda a: cut(a, 15), skipped=skipped,
        dropped=lambda layer, size, a: 0 if layer in (1, LAYERS) else max(0, size - kept(a, 35)), **split,
    )  # fmt: skip


def ledger_run() -> list[engine.StepReport]:
    poisoned = tuple(range(4, LEDGER_STEPS, 13))
    return run(0, LEDGER_STEPS, poisoned, together(15, 35, LEDGER_DROP), TINY)[2]


def test_the_ledger_of_two_ranks_equals_a_recount(ranks: Any) -> None:
    reports = ranks(WORLD).run(ledger_run, timeout=240.0)[0]
    counted = recount_50(lambda step: step % 13 == 4, accumulation=ACCUMULATION, dp=WORLD)
    told = [(r.tokens_seen, r.tokens_computed, r.layers_skipped, r.skipped_steps) for r in reports]
    assert told == counted.by_step
    assert counted.layers > 0
    assert counted.skipped_steps == 4


def test_metrics_and_summary_equal_a_recount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the command line, whose first loss scale is too high."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", FAILURE_DIRECTORY):
        monkeypatch.delenv(name, raising=False)
    model = Path(__file__).resolve().parents[2] / "examples" / "gpt_text" / "model.py"
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 60)
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "seed": 0,
        "model": {"target": f"{model}:GPT", "args": {"vocabulary_size": 256, "sequence_length": 32, **TINY}},
        "data": {"path": "text.txt", "sequence_length": 32},
        "training": {"steps": LEDGER_STEPS},
        "optimizer": {"type": "SGD", "params": SGD},
        "fp16": {"enabled": True, "initial_scale_power": 22},
        **together(15, 35, LEDGER_DROP),
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    assert main(["--config", str(tmp_path / "run.json"), "--output", str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    counted = recount_50(lambda step: lines[step]["skipped"], accumulation=2, dp=1, samples=8)
    names = ("tokens", "tokens_computed", "layers_skipped", "skipped_steps")
    assert [tuple(line[name] for name in names) for line in lines] == counted.by_step
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert tuple(summary[name] for name in names) == counted.by_step[-1]
    assert counted.skipped_steps > 0
    assert 0 < counted.layers < LEDGER_STEPS * 2 * LAYERS
