"""The schema and the reference page: fresh, valid, and of one mind with the sections."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from engine.config import docs, examine, load_config, schema
from engine.config.aliases import ALIASES
from engine.config.places import join_path
from tests.unit.config.test_suggest import keys
from tests.unit.config.test_traps import CURRICULUM, INVALID, NOT_BUILT, VALID

CANONICAL: list[dict[str, Any]] = [
    {},
    {"$schema": "x", "_note": 1, "//": 2, "fp16": {"_why": "x", "enabled": True}},
    {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": "auto"}}},
    {"optimizer": {"type": "my.Own", "params": {"x": [1, {"y": None}]}}},
    {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_type": "linear"}}},
    {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}},
    {"curriculum_learning": CURRICULUM},
    {"compression_training": {"layer_reduction": {"enabled": True}}, "nebula": {"enabled": True}, "amp": {"x": 1}},
    {"model": {"target": "a:b", "args": {"width": 3}}, "data": {"path": None}, "training": {"num_epochs": 1.5}},
    {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["a"]}]}}},
]
INEXPRESSIBLE = {
    "minimum above the initial scale",
    "curriculum that falls",
    "discrete schedule of unequal lists",
    "dropped layers miscounted",
    "elastic batch too small",
    "elastic world upside down",
}
"""Rules that compare two numbers of a file, which JSON Schema cannot."""


@pytest.fixture(scope="module")
def validator() -> Any:
    made = schema.json_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def test_the_checked_in_files_are_fresh() -> None:
    assert schema.FILE.read_text(encoding="utf-8") == schema.render(), "run python -m engine.config.schema"
    assert docs.FILE.read_text(encoding="utf-8") == docs.render(), "run python -m engine.config.docs"


@pytest.mark.parametrize("tree", [*CANONICAL, *NOT_BUILT.values()], ids=lambda tree: json.dumps(tree)[:40])
def test_the_schema_accepts_what_is_right(validator: Any, tree: dict[str, Any]) -> None:
    if tree.get("optimizer", {}).get("type") == "musgd":
        return  # not canonical
    config = load_config(tree)
    for canonical in (tree, config.raw, config.resolved()):
        assert [error.message for error in validator.iter_errors(canonical)] == []


@pytest.mark.parametrize("tree", [entry[0] for entry in VALID.values()], ids=VALID.keys())
def test_the_schema_accepts_what_is_noted(validator: Any, tree: dict[str, Any]) -> None:
    assert validator.is_valid(tree)


@pytest.mark.parametrize("name", sorted(INVALID.keys() - INEXPRESSIBLE))
def test_the_schema_refuses_what_is_wrong(validator: Any, name: str) -> None:
    assert not validator.is_valid(INVALID[name][0])


@pytest.mark.parametrize("name", sorted(INEXPRESSIBLE))
def test_what_the_schema_cannot_say_is_known(validator: Any, name: str) -> None:
    assert validator.is_valid(INVALID[name][0])


def test_schema_and_sections_agree_on_random_values(validator: Any) -> None:
    """Any key with any scalar: both take it or both refuse it (texts that the dialect reads aside)."""
    stream = random.Random(0)
    values: list[Any] = [True, False, None, 0, 1, 2, -1, 7, 0.5, 1.5, [], [1], {}, "cpu", "?"]
    disagreements = []
    for path, _ in keys():
        for value in stream.sample(values, 2):
            tree: Any = value
            for part in reversed(path):
                tree = {part: tree}
            found = examine(tree)
            if found.notes:
                continue  # read as something else: not canonical
            if bool(found.problems) == validator.is_valid(tree):
                disagreements.append((join_path(path), value, [problem.render() for problem in found.problems]))
    assert disagreements == []


def test_every_key_is_described() -> None:
    page = docs.render()
    for path, model in keys():
        assert model.model_fields[str(path[-1])].description, join_path(path)
        assert f"| `{path[-1]}` |" in page
    for old in ALIASES:
        assert f"`{join_path(old)}`" in page
