"""The schema and the reference page: fresh, valid, and of one mind with the sections."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from engine.config import docs, examine, load_config, schema
from engine.config.aliases import ALIASES
from engine.config.places import join_path
from engine.config.sections.arguments import OPTIMIZER_PARAMS
from tests.unit.config.generated import Generator
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
COMPARED = (
    "fp16.min_loss_scale", "min_difficulty", "max_step", ".difficulty", "random_ltd_layer_id", "micro_batch_sizes",
    "max_gpus", "num_global_blocks", "num_different_global_patterns", "global_block_end_indices",
    "tensor_parallel.tp_size",
)  # fmt: skip
"""The keys that such rules are about."""
NUM_GENERATED = 2000


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
        for value in stream.sample(values, 1):
            tree: Any = value
            for part in reversed(path):
                tree = {part: tree}
            found = examine(tree)
            if found.notes:
                continue  # read as something else: not canonical
            if bool(found.problems) == validator.is_valid(tree):
                disagreements.append((join_path(path), value, [problem.render() for problem in found.problems]))
    assert disagreements == []


def test_schema_and_sections_agree_on_generated_files(validator: Any, figure: Callable[[str], None]) -> None:
    """Whole files, half of them with mistakes: valid for the one exactly if valid for the other."""
    counts: Counter[tuple[bool, bool]] = Counter()
    disagreements = []
    for seed in range(NUM_GENERATED):
        tree = Generator(seed, wrong=0.12 if seed % 2 else 0.0).config()
        problems = examine(tree).problems
        answers = (not problems, validator.is_valid(tree))
        counts[answers] += 1
        is_comparison = bool(problems) and all(
            problem.path.endswith(COMPARED) or problem.path.startswith("smp.") for problem in problems
        )
        if answers[0] != answers[1] and not (answers[1] and is_comparison):
            disagreements.append((seed, answers, [problem.render() for problem in problems]))
    both = f"{counts[True, True]} valid and {counts[False, False]} invalid for both"
    figure(f"{NUM_GENERATED} generated files: {both}, {counts[False, True]} for a comparison of two numbers")
    assert disagreements == []
    assert min(counts[True, True], counts[False, False]) > NUM_GENERATED / 5
    assert counts[False, True] < NUM_GENERATED / 100


def test_every_key_is_described() -> None:
    page = docs.render()
    for path, model in keys():
        assert model.model_fields[str(path[-1])].description, join_path(path)
        assert f"| `{path[-1]}` |" in page
    for old in ALIASES:
        assert f"`{join_path(old)}`" in page


def test_every_property_tells_what_it_is(validator: Any) -> None:
    """For hover help: a description and a default at each key, the values where they are few."""
    made = validator.schema
    silent, without_default, enums = [], [], 0
    for name, definition in {"": made, **made["$defs"]}.items():
        for key, field in definition.get("properties", {}).items():
            if field is False or key == "$schema":
                continue
            silent += [] if "description" in field or "$ref" in field else [f"{name}.{key}"]
            enums += "enum" in json.dumps(field)
            if name.endswith("Section") and "$ref" not in field and "params" not in (name, key):
                without_default += [] if "default" in field or key == "type" else [f"{name}.{key}"]
    rules = json.dumps(made)
    assert not silent
    assert not without_default
    assert enums > 20
    assert rules.count('"if"') > 20


def test_the_schema_explains_constructor_arguments(validator: Any) -> None:
    arguments = validator.schema["$defs"]["OptimizerSection"]["properties"]["params"]["properties"]
    assert arguments["lr"]["description"] == "The learning rate."
    known = {argument for names in OPTIMIZER_PARAMS.values() for argument in names}
    assert not {argument for argument in known if "description" not in arguments[argument]}


def test_editors_find_the_schema() -> None:
    """The paths in the examples' configs and in the editor's settings lead to the schema that is checked in."""
    examples = schema.FILE.parents[1] / "examples"
    configs = sorted(examples.glob("*/config.json"))
    assert configs
    for file in configs:
        assert (file.parent / json.loads(file.read_text())["$schema"]).resolve() == schema.FILE
        jsonschema.Draft202012Validator(schema.json_schema()).validate(json.loads(file.read_text()))
    settings = json.loads((examples / ".vscode/settings.json").read_text())
    (entry,) = settings["json.schemas"]
    assert (examples / entry["url"]).resolve() == schema.FILE
    matched = {file for pattern in entry["fileMatch"] for file in examples.glob(pattern.removeprefix("/"))}
    assert matched == set(configs)


def test_the_wheel_carries_the_schema() -> None:
    import tomllib

    project = tomllib.loads((schema.FILE.parents[1] / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert carried == {"schemas/ptrain.schema.json": "engine/config/ptrain.schema.json"}
