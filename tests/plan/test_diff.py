"""`diff`: meaning and not text, consequences in figures, and exit codes that nobody takes for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import diff as command
from engine.cli.main import main
from engine.config import ConfigError
from engine.plan import ModelFacts, diff

BASE: dict[str, Any] = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "training": {"steps": 100},
    "zero_optimization": {"stage": 1},
}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(dict(reversed(BASE.items())), indent=7),
        json.dumps(BASE).replace("0.001", "1e-3").replace("16", "16.0"),
        json.dumps(BASE).replace("0.001", '"0.001"').replace("AdamW", "adamw"),
        json.dumps({**BASE, "gradient_clipping": 1.0, "bf16": {"enabled": False}, "seed": 1234, "_note": 3}),
        json.dumps({**BASE, "bfloat16": {"enabled": False}, "wandb": {"enabled": False, "project": "other"}}),
        json.dumps({**BASE, "zero_optimization": {"stage": 1, "stage3_max_live_parameters": 5}}),
        json.dumps({**BASE, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}),
        json.dumps({**BASE, "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}}}),
        "// a comment\n" + json.dumps(BASE)[:-1] + ",}",
    ],
)
def test_text_makes_no_difference(tmp_path: Path, text: str) -> None:
    one, other = write(tmp_path / "one.json", json.dumps(BASE)), write(tmp_path / "other.json", text)
    found = diff(one, other, 2)
    assert found.alike, found.render()
    assert main(["diff", one, other, "--world", "2"]) == 0


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        ({"train_batch_size": 64}, "train_batch_size", (16, 64)),
        ({"gradient_clipping": 0}, "gradient_clipping", (1.0, 0)),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", (1, 3)),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}}, "optimizer.params.lr", (1e-3, 2e-3)),
        ({"bf16": {"enabled": True}}, "bf16.enabled", (False, True)),
        ({"tensorboard": {"enabled": True}}, "tensorboard.enabled", (False, True)),
    ],
)
def test_a_change_is_told_with_both_values(change: dict[str, Any], key: str, values: tuple[Any, Any]) -> None:
    found = diff(BASE, {**BASE, **change}, 2)
    assert {entry.key: entry.values for entry in found.changed}[key] == values
    assert found.exit_code == 1
    assert f"{key}: " in found.render()
    back = diff({**BASE, **change}, BASE, 2)
    assert {entry.key: entry.values for entry in back.changed}[key] == values[::-1]


def figures(change: dict[str, Any], world: int = 4, facts: ModelFacts | None = None) -> dict[str, tuple[str, str, str]]:
    found = diff(BASE, {**BASE, **change}, world, facts=facts)
    return {entry.what: (entry.first, entry.second, entry.remark) for entry in found.consequences}


def test_consequences() -> None:
    assert figures({"train_batch_size": 64})["samples per update"] == ("16", "64", "x 4")
    longer = {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 50}}}
    assert figures(longer)["warm-up"] == ("10 updates (10.0% of training)", "50 updates (50.0% of training)", "")
    # fp32 under AdamW: 4 parameters + 4 gradients + 8 moments; stage 1 shares the moments, stage 3 all of it
    whole = figures({"zero_optimization": {"stage": 3}})["model states on a rank"]
    assert whole == ("10 bytes per parameter", "4 bytes per parameter", "x 0.4")
    billion = ModelFacts(10**9, 10**9, blocks=("block",) * 100, num_block_parameters=10**7)
    sized = figures({"zero_optimization": {"stage": 0}}, 4, billion)
    assert sized["model states on a rank"] == ("10 GB", "16 GB", "x 1.6")
    # reduce-scatter of fp32 gradients and all-gather of parameters, against both again for backward
    sent = figures({"zero_optimization": {"stage": 3}}, 4, billion)["sent by a rank per update"]
    assert sent == ("6 GB", "9 GB", "x 1.5")


def test_what_is_without_effect_is_told_apart() -> None:
    found = diff(BASE, {**BASE, "sparse_gradients": True}, 2)
    assert found.alike
    assert [change.key for change in found.without_effect] == ["sparse_gradients"]
    assert "without effect in either" in found.render()


def test_batches_that_agree_here_only() -> None:
    other = {key: value for key, value in BASE.items() if key != "train_batch_size"}
    found = diff(BASE, {**other, "train_micro_batch_size_per_gpu": 8}, 2)
    assert found.alike
    assert "may differ on other numbers of ranks" in found.render()
    assert not diff(BASE, {**other, "train_micro_batch_size_per_gpu": 8}, 4).alike


def test_problems_of_both_files_come_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one.json", '{"train_batch_size": 3}')
    other = write(tmp_path / "other.json", '{"train_batch_sise": 4}')
    with pytest.raises(ConfigError) as caught:
        diff(one, other, 2)
    assert {problem.file for problem in caught.value.problems} == {one, other}
    assert main(["diff", one, other, "--world", "2"]) == 2
    assert "2 problems" in capsys.readouterr().err


def test_exit_codes_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write(tmp_path / "one.json", json.dumps(BASE))
    other = write(tmp_path / "other.json", json.dumps({**BASE, "seed": 3}))
    assert main(["diff", one, one, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alike"] is True
    assert main(["diff", one, other, "--json", "--model-size", "1.3b"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["alike"], told["changed"][0]["key"], told["changed"][0]["values"]) == (False, "seed", [1234, 3])
    assert main(["diff", one, str(tmp_path / "absent.json")]) == 2
    assert main(["diff", one, other, "--model-size", "many"]) == 2
    assert "is not a number of parameters" in capsys.readouterr().err

    def breaks(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr("engine.plan.diff", breaks)
    assert main(["diff", one, other]) == command.TROUBLE
    assert "unforeseen" in capsys.readouterr().err
