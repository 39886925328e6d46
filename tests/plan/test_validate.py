"""`validate`: the four verdicts as a function and as JSON, and no problem that only follows from another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.plan import validate

ROOT = Path(__file__).resolve().parents[2]
BATCH = {"train_batch_size": 8}
KEYS = ["verdict", "needs_values", "not_built", "problems", "notes"]


@pytest.mark.parametrize(
    ("config", "world", "kind", "needs_values", "not_built"),
    [
        (BATCH, 2, "valid", [], []),
        ({"train_batch_size": "auto"}, 1, "needs-values", ["train_batch_size"], []),
        ({**BATCH, "amp": {"enabled": True}}, 1, "not-built", [], ["amp.enabled"]),
        (BATCH, 3, "invalid", [], []),
        ({}, 1, "needs-values", ["train_micro_batch_size_per_gpu"], []),
        ({**BATCH, "zzz": 1, "amp": {"enabled": True}}, 1, "invalid", [], ["amp.enabled"]),
    ],
)
def test_four_verdicts(
    config: dict[str, Any], world: int, kind: str, needs_values: list[str], not_built: list[str]
) -> None:
    found = validate(config, world)
    record = found.to_json()
    assert list(record) == KEYS
    assert (found.kind, record["verdict"]) == (kind, kind)
    assert (record["needs_values"], record["not_built"]) == (needs_values, not_built)
    assert bool(found.problems) == (kind == "invalid")
    assert found.exit_code == (2 if kind == "invalid" else 0)
    json.dumps(record)


def paths(config: dict[str, Any], world: int = 1, **options: Any) -> list[str]:
    return sorted(problem.path for problem in validate(config, world, **options).problems)


def test_the_plans_problems_come_with_the_readers() -> None:
    wrong = {"train_batch_size": 7, "bf16": {"enable": True}, "optimizer": {"type": "LBFGS"}}
    assert paths(wrong, 2) == ["bf16.enable", "optimizer.type", "train_batch_size"]


@pytest.mark.parametrize(
    ("config", "alone"),
    [
        ({"train_batch_sizee": 8}, ["train_batch_sizee"]),
        ({"train_batch_size": "many", "gradient_accumulation_steps": 2}, ["train_batch_size"]),
        ({**BATCH, "zero_optimization": {"stage": 7, "mics_shard_size": 1}}, ["zero_optimization.stage"]),
        ({**BATCH, "bf16": {"enabled": "x"}, "data_types": {"param_dtype": "bf16"}}, ["bf16.enabled"]),
        ({**BATCH, "scheduler": {"type": "WarmupDecayLR"}, "training": {"steps": 0}}, ["training.steps"]),
    ],
)
def test_what_only_follows_from_a_mistake_is_not_told(config: dict[str, Any], alone: list[str]) -> None:
    assert paths(config) == alone


def test_options_reach_the_reader() -> None:
    assert validate({"zzz": 1, **BATCH}, lenient=True).kind == "valid"
    assert validate({"train_batch_size": "auto"}, 2, auto={"train_batch_size": 4}).kind == "valid"
    assert validate(BATCH, 2, overrides=["train_batch_size=9"]).kind == "invalid"


def test_the_command_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 7, "zzz": 1}))
    assert main(["validate", str(file), "--world", "2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == validate(str(file), 2).to_json()
    assert main(["validate", str(file), "--world", "7", "--lenient"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "valid"
    assert main(["validate", str(tmp_path / "absent.json"), "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == "file"


def test_it_is_quick(tmp_path: Path) -> None:
    """0.35 s on an idle core, with compiled files; twice that where other work shares the machine."""
    command = [sys.executable, "bin/ptrain", "validate", "examples/gpt_text/config.json"]
    environment = {"PATH": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    seconds = []
    for _ in range(6):
        before = os.times()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        after = os.times()
        assert done.returncode == 0, done.stderr
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds[1:]) < 0.7


@pytest.mark.parametrize("module", ["engine.config", "engine.plan", "engine.cli.main"])
def test_importing_shows_no_torch(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert module.split(".")[0] in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "numpy", "tensorboard", "wandb")}
