"""The verdict on a file: config and plan judged together, for the ranks that the sizes fit, in the user's spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.config import ConfigError, examine, load_config
from engine.plan import World, fitting_world, plan, usable, verdict

MISTAKES = """{
  "train_batch_size": 10,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_cliping": 0.5,
  "bfloat16": {"enabled": true},
  "fp16": {"enabled": true},
  "optimizer": {"type": "LBFGS"},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "many"}}
}"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.json"
    path.write_text(MISTAKES)
    return str(path)


def test_mistakes_of_the_config_and_of_its_plan_are_told_together(file: str) -> None:
    """Each at its line and in its own spelling; what rests on a value that is wrong is left out."""
    told = {problem.path: problem.line for problem in verdict(examine(file)).problems}
    assert told == {
        "train_batch_size": 2,
        "gradient_cliping": 4,
        "bfloat16.enabled": 5,
        "optimizer.type": 7,
        "scheduler.params.warmup_num_steps": 8,
    }


@pytest.mark.parametrize("command", ["validate FILE", "plan FILE", "train --config FILE --dry-run"])
def test_every_command_tells_them(file: str, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([word.replace("FILE", file) for word in command.split()]) == 2
    captured = capsys.readouterr()
    text = captured.out + captured.err
    for words in ("2:23: train_batch_size", "4:3: gradient_cliping", "5:27: bfloat16.enabled", "7:25: optimizer.type"):
        assert words in text


def test_initialize_tells_them() -> None:
    import torch

    import engine

    with pytest.raises(ConfigError) as caught:
        engine.initialize(model=torch.nn.Linear(1, 1), config=json.loads(MISTAKES))
    assert len(caught.value.problems) == 5


UNCLEAR: dict[str, tuple[dict[str, Any], list[str]]] = {
    "precision that is wrong": (
        {"fp16": {"enabled": "perhaps"}, "data_types": {"param_dtype": "fp16"}},
        ["fp16.enabled"],
    ),
    "stage that is wrong": (
        {"zero_optimization": {"stage": 7, "zero_hpz_partition_size": 2}},
        ["zero_optimization.stage"],
    ),
    "section that is misspelled": (
        {"zero_optimisation": {"stage": 3}, "zero_optimization": {"zero_hpz_partition_size": 2}},
        ["zero_optimisation"],
    ),
    "batch that is wrong": (
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": "x", "gradient_accumulation_steps": 2},
        ["train_micro_batch_size_per_gpu"],
    ),
    "clear values beside a wrong one": (
        {"train_batch_size": 7, "gradient_accumulation_steps": 2, "seed": -1, "train_micro_batch_size_per_gpu": None},
        ["seed", "train_batch_size"],
    ),
    "key that may have been meant": (
        {"grad_accum_type": "fp16", "data_types": {"param_dtype": "fp16"}, "optimizer": {"type": "LBFGS"}},
        ["grad_accum_type", "optimizer.type"],
    ),
}


@pytest.mark.parametrize(("tree", "paths"), UNCLEAR.values(), ids=UNCLEAR.keys())
def test_nothing_is_said_of_what_is_not_known(tree: dict[str, Any], paths: list[str]) -> None:
    judged = verdict(examine({"train_micro_batch_size_per_gpu": 1, **tree}))
    assert sorted(problem.path for problem in judged.problems) == paths
    assert judged.needs_values == ()


SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({"train_batch_size": 8}, 1),
    "three batch sizes": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        4,
    ),
    "two batch sizes": ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 1),
    "shard groups": ({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}, 8),
    "secondary shards": (
        {"train_batch_size": 32, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}},
        16,
    ),
    "groups and batch sizes": (
        {
            "train_batch_size": 48,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 3, "mics_shard_size": 8},
        },
        24,
    ),
    "no number of ranks": ({"train_batch_size": 4, "gradient_accumulation_steps": 8}, 1),
    "no batch size": ({}, 1),
}


@pytest.mark.parametrize(("tree", "size"), SIZES.values(), ids=SIZES.keys())
def test_a_config_is_judged_for_the_ranks_it_was_written_for(tree: dict[str, Any], size: int) -> None:
    config = load_config(tree)
    assert fitting_world(config).size == size
    judged = verdict(config)
    assert (judged.kind == "invalid") == (tree == SIZES["no number of ranks"][0])
    assert any(note.message.startswith(f"checked for {size} ranks") for note in judged.notes) == (size > 1)
    assert verdict(config, World(7)).problems or size == 1


def test_a_config_without_a_batch_size_needs_one() -> None:
    judged = verdict(load_config({"bf16": {"enabled": True}}))
    assert (judged.kind, judged.needs_values) == ("needs-values", ("train_micro_batch_size_per_gpu",))
    with pytest.raises(ConfigError, match="no batch size: neither train_batch_size nor train_micro_batch_size_per_gpu"):
        plan(load_config({}))
    supplied = load_config({}, auto={"train_micro_batch_size_per_gpu": 4, "seed": 9})
    assert plan(supplied, World(2, 2)).batch.global_batch_size == 8
    assert supplied.seed == 1234


AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "bfloat16": {"enabled": "auto"},
    "zero_optimization": {"stage": "auto", "stage3_prefetch_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
NEEDED = {"train_batch_size": 4, "bfloat16.enabled": True, "zero_optimization.stage": 1, "optimizer.params.lr": 0.1}


def test_auto_is_listed_in_one_line_and_supplied_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(AUTO))
    listed = ", ".join(sorted(NEEDED))
    assert main(["validate", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"valid, needs values: {listed}"
    assert main(["plan", str(path)]) == 2
    assert f'needs a value here in place of "auto": {listed}' in capsys.readouterr().err
    given = [word for key, value in NEEDED.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert main(["validate", str(path), *given]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "valid"
    assert main(["plan", str(path), *given]) == 0
    assert "stage 1" in capsys.readouterr().out


@pytest.mark.parametrize("nested", [False, True])
def test_auto_is_supplied_by_initialize(nested: bool) -> None:
    import torch

    import engine

    values: dict[str, Any] = dict(NEEDED)
    if nested:
        values = {
            "train_batch_size": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"params": {"lr": 0.1}},
        }
    made, optimizer, *_ = engine.initialize(model=torch.nn.Linear(2, 2), config=AUTO, auto=values)
    try:
        assert made.train_batch_size() == 4
        assert (made.plan.zero.stage, made.plan.precision.compute) == (1, "bf16")
        assert optimizer is not None
        assert optimizer.param_groups[0]["lr"] == 0.1
    finally:
        made.destroy()


def test_a_usable_config_is_handed_on() -> None:
    found = examine({"train_batch_size": 3})
    assert usable(found) is found.config
    with pytest.raises(ConfigError):
        usable(examine("no/such/file.json"))
