"""`load_config`: sources, overrides, "auto", provenance, and the shape of errors."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from engine.config import Config, ConfigError, EngineError, load_config
from tests.unit.config.conftest import Write, notes_of, paths_of, problems_of


def test_defaults_are_deepspeeds() -> None:
    config = load_config({})
    assert config.train_batch_size is None
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.stage == 0
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.zero_optimization.prefetch_bucket_size == 50_000_000
    assert (config.fp16.initial_scale_power, config.fp16.hysteresis, config.fp16.min_loss_scale) == (16, 2, 1.0)
    assert config.optimizer is None
    assert config.model is None
    assert config.data.sequence_length == 128
    assert config.seed == 1234
    assert config.notes == ()
    assert config.not_built == ()


def test_a_path_a_dict_and_a_config_give_the_same(write: Write) -> None:
    tree = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    path = write(json.dumps(tree))
    from_file, from_dict = load_config(path), load_config(tree)
    assert from_file == from_dict == load_config(Path(path)) == load_config(from_file)
    assert from_file.hash() == from_dict.hash()
    assert len({from_file, from_dict}) == 1
    assert from_file.source == path
    assert from_dict.source is None
    assert load_config({"seed": 1}) != load_config({"seed": 2})
    assert load_config({"seed": 1}).hash() != load_config({"seed": 2}).hash()


def test_a_dict_is_never_changed() -> None:
    tree = {
        "bfloat16": {"enabled": "true"},
        "zero_optimization": {"cpu_offload": True, "stage3_prefetch_bucket_size": 5e7},
        "optimizer": {"type": "adam", "params": {"lr": "auto", "betas": (0.9, 0.99)}},
    }
    before = copy.deepcopy(tree)
    load_config(tree, overrides=["optimizer.params.lr=0.1"])
    assert tree == before


def test_other_mappings_and_values_from_python() -> None:
    import numpy

    tree = OrderedDict(
        seed=numpy.int64(3), data=MappingProxyType({"path": Path("a") / "b"}), steps_per_print=float("inf")
    )
    config = load_config(tree)
    assert (config.seed, config.data.path, config.steps_per_print) == (3, os.path.join("a", "b"), None)
    assert paths_of({"seed": object()}) == ["seed"]
    assert "key 3" in problems_of({3: 4})[0].message
    loop: dict[str, Any] = {}
    loop["data"] = loop
    assert any("holds itself" in problem.message for problem in problems_of(loop))


def test_a_config_is_frozen_and_picklable() -> None:
    config = load_config({"seed": 3, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    with pytest.raises(Exception, match="frozen"):
        config.seed = 4  # type: ignore[misc]
    with pytest.raises(Exception, match="frozen"):
        config.zero_optimization.stage = 2  # type: ignore[misc]
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config
    assert copied.autos == config.autos


@pytest.mark.parametrize("source", ["no/such.json", "", "\0", '{"seed": 1}', 5, None, b"\xff\xfe"])
def test_a_source_that_is_none(source: object) -> None:
    (problem,) = problems_of(source)
    assert problem.message


def test_a_missing_file_names_its_neighbour(write: Write) -> None:
    path = write("{}")
    (problem,) = problems_of(path.replace("run.json", "rum.json"))
    assert problem.render().endswith(f"rum.json: there is no such file; did you mean {path}?")
    (problem,) = problems_of(os.path.dirname(path))
    assert "is a folder" in problem.message


def test_overrides_set_values_and_create_sections(write: Write) -> None:
    path = write('{"bf16": {"enabled": true}, "zero_optimization": false}')
    config = load_config(
        path,
        overrides=[
            "zero_optimization.stage=2",
            "zero_optimization.stage3_prefetch_bucket_size=7",
            "bfloat16.enabled=false",
            "model.target=package.module:Model",
            'model.args={"width": 64, }',
            "optimizer.type=adamw",
            "optimizer.params.lr=1e-3",
            "data.path=a=b",
            "wandb.group=null",
            "wandb.team=NaN",
            'wandb.project=1, "x": 2',
        ],
    )
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.prefetch_bucket_size == 7
    assert config.bf16.enabled is False
    assert config.model is not None
    assert (config.model.target, config.model.args) == ("package.module:Model", {"width": 64})
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.params) == ("AdamW", {"lr": 1e-3})
    assert config.data.path == "a=b"
    assert (config.wandb.group, config.wandb.team, config.wandb.project) == (None, "NaN", '1, "x": 2')
    assert config.origin("data.path") == "user"
    assert config.locate("data.path") == ("--set data.path=a=b", None, None)
    assert load_config({}, overrides={"zero_optimization.stage": 3}).zero_optimization.stage == 3


def test_a_wrong_override_names_itself() -> None:
    found = problems_of({}, overrides=["zero_optimization.stagee=2", "seed", "=3", "fp16.enabled=perhaps", "a[0]=1"])
    texts = [problem.render() for problem in found]
    assert any(
        text.startswith("--set zero_optimization.stagee=2: ") and "zero_optimization.stage?" in text for text in texts
    )
    assert any(text.startswith("--set seed: ") for text in texts)
    assert any(text.startswith("--set =3: ") for text in texts)
    assert any(text.startswith("--set fp16.enabled=perhaps: ") and "true or false" in text for text in texts)
    assert len(texts) == 5
    assert paths_of({}, overrides=["zero_optimization.stagee=2"], lenient=True) == ["zero_optimization.stagee"]


def test_auto_is_listed_or_supplied() -> None:
    tree = {
        "train_batch_size": "auto",
        "bf16": "auto",
        "zero_optimization": {"stage": "auto", "stage3_prefetch_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }
    config = load_config(tree)
    assert config.autos == {
        "train_batch_size",
        "bf16",
        "zero_optimization.stage",
        "zero_optimization.prefetch_bucket_size",
        "optimizer.params.lr",
        "optimizer.params.betas",
    }
    assert config.needs_values == ("bf16", "optimizer.params.lr", "train_batch_size", "zero_optimization.stage")
    assert config.zero_optimization.prefetch_bucket_size == 50_000_000
    assert config.optimizer is not None
    assert config.optimizer.params == {}
    assert config.raw["optimizer"]["params"] == {"lr": "auto", "betas": "auto"}

    supplied = load_config(
        config,
        auto={"optimizer": {"params": {"lr": 0.1}}, "zero_optimization.stage": 3, "bf16.enabled": True, "seed": 9},
        overrides=["train_batch_size=8"],
    )
    assert supplied.autos == {"bf16", "zero_optimization.prefetch_bucket_size", "optimizer.params.betas"}
    assert supplied.zero_optimization.stage == 3
    assert supplied.seed == 1234
    assert supplied.origin("zero_optimization.stage") == "auto"
    assert supplied.origin("zero_optimization.stage3_prefetch_bucket_size") == "default"
    assert "not list" in problems_of(config, auto=[1])[0].message
    assert paths_of(config, auto={"zero_optimization.stage": 7}) == ["zero_optimization.stage"]


def test_auto_values_that_follow_from_others() -> None:
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    assert load_config(batch).needs_values == ()
    assert load_config({**batch, "train_batch_size": "auto"}).needs_values == (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    )
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}}
    assert load_config({"scheduler": schedule}).needs_values == (
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_max_lr",
    )
    waiting = {"type": "Adam", "params": {"lr": "auto"}}
    assert load_config({"scheduler": schedule, "optimizer": waiting}).needs_values == (
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
    )
    tree = {"scheduler": schedule, "training": {"steps": 5}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    assert load_config(tree).needs_values == ()


def test_auto_that_is_a_value_of_its_own() -> None:
    config = load_config({"device": "auto", "pipeline": {"stages": "auto"}})
    assert config.autos == frozenset()
    assert config.device == "auto"


def test_where_values_come_from(write: Write) -> None:
    path = write(
        '{\n  "bfloat16": {"enabled": true},\n  "zero_optimization": {\n    "stage3_max_live_parameters": 9}\n}'
    )
    config = load_config(path)
    assert config.origin("bf16.enabled") == config.origin("bfloat16.enabled") == "user"
    assert config.origin("zero_optimization.stage") == "default"
    assert config.locate("bf16.enabled") == (path, 2, 27)
    assert config.locate("zero_optimization.max_live_parameters") == (path, 4, 35)
    assert config.locate("zero_optimization.stage") == (path, 3, 24)
    assert config.locate("seed") == (path, None, None)
    assert load_config(config).locate("bf16.enabled") == (path, 2, 27)


def test_raw_is_a_copy_and_resolved_is_read_back() -> None:
    tree = {
        "train_batch_size": "8",
        "zero_optimization": {"cpu_offload": True},
        "model": {"target": "a:b", "args": {"n": 1}},
    }
    config = load_config(tree)
    assert config.raw == {
        "train_batch_size": 8,
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "model": {"target": "a:b", "args": {"n": 1}},
    }
    config.raw["model"]["args"]["n"] = 2
    assert config.raw["model"]["args"] == {"n": 1}
    assert load_config(config.resolved()) == config
    json.dumps(config.resolved(), allow_nan=False)


def test_comments_are_left_out() -> None:
    tree = {
        "$schema": "x",
        "_why": 1,
        "//": "y",
        "bf16": {"_note": 3},
        "optimizer": {"type": "SGD", "params": {"//lr": 1}},
    }
    config = load_config(tree)
    assert config.raw == {"bf16": {}, "optimizer": {"type": "SGD", "params": {}}}


def test_lenient_turns_unknown_keys_into_notes() -> None:
    tree = {"zero_optimisation": {"stage": 3}, "fp16": {"enabledd": True}}
    assert paths_of(tree) == ["fp16.enabledd", "zero_optimisation"]
    for options, extra in (({"lenient": True}, {}), ({}, {"strict": False}), ({}, {"strict": "false"})):
        notes = notes_of({**tree, **extra}, **options)
        assert "did you mean zero_optimization?" in notes["zero_optimisation"]
        assert "did you mean fp16.enabled?" in notes["fp16.enabledd"]


def test_an_error_counts_and_sorts(write: Write) -> None:
    path = write('{"zero_optimization": {\n"stage": 4,\n"stagee": 1}, "fp16": true}')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert isinstance(caught.value, EngineError)
    assert str(caught.value).splitlines() == [
        f"3 problems in {path}:",
        f"  {path}:2:10: zero_optimization.stage: 4 is not allowed here (allowed: an integer from 0 to 3)"
        "; leave the key out for the default, 0",
        f"  {path}:3:1: zero_optimization.stagee: unknown key; did you mean zero_optimization.stage?",
        f'  {path}:3:23: fp16: true is not allowed here (allowed: an object); write {{"enabled": true}}',
    ]
    first = caught.value.problems[0].to_json()
    assert (first["path"], first["line"], first["found"], first["code"]) == ("zero_optimization.stage", 2, 4, "value")
    assert len(str(ConfigError(caught.value.problems[:1])).splitlines()) == 2


def test_import_is_light() -> None:
    code = "import sys, engine.config; a = set(sys.modules); engine.config.load_config({}); b = set(sys.modules)"
    code += "; print(sorted({'pydantic'} & a), sorted({'torch', 'jsonschema', 'numpy'} & b))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["[]", "[]"]


def test_config_can_be_made_directly() -> None:
    config = Config()
    assert config == load_config({})
    assert config.autos == frozenset()
    assert config.origin("seed") == "default"
    assert config.locate("seed") == (None, None, None)
