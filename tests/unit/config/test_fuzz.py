"""Whatever comes in, the answer is a Config or a ConfigError: never another exception."""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import ConfigError, Examination, examine, load_config
from engine.config.reader import read_text
from engine.config.sections.arguments import BOOLEANS, INTEGERS, NUMBERS, OPTIMIZER_PARAMS, PAIRS, SCHEDULER_PARAMS
from engine.config.suggest import known_paths
from engine.plan import verdict
from tests.unit.config.test_schema import CANONICAL
from tests.unit.config.test_suggest import keys, typo
from tests.unit.config.test_traps import CURRICULUM

QUICK = settings(
    max_examples=int(os.environ.get("PTRAIN_FUZZ_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PATHS = sorted({tuple(path) for path, _ in keys()}, key=str)
KEYS = st.sampled_from(sorted(known_paths()))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "true", "5e8", "cpu", "{{x}}", "fp16", "AdamW", "NaN", "-1", "a.b", 1e400]),
)
ARGUMENTS = sorted(INTEGERS | NUMBERS | BOOLEANS | PAIRS | {"warmup_type", "max_grad_norm", "comm_backend_name"})
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
VALID = [
    *CANONICAL,
    {
        "train_batch_size": 24,
        "fp16": {"enabled": True, "loss_scale": 0},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "curriculum_learning": CURRICULUM,
        "wandb": {"enabled": True},
    },
]


def consistent(found: Examination) -> None:
    """What must hold of any answer, of the plan's rules as well."""
    str(ConfigError(found.problems))
    judged = verdict(found)
    assert judged.render()
    assert judged.kind == "invalid" or not found.problems
    assert all(problem in judged.problems for problem in found.problems)
    for problem in found.problems:
        assert problem.message
        assert json.dumps(problem.to_json(), default=str)
    if not found.problems:
        assert found.config is not None
        again = load_config(found.config.raw)
        assert again == found.config
        assert again.raw == found.config.raw
        assert load_config(found.config.resolved()) == found.config
        assert set(found.config.needs_values) <= found.config.autos


@QUICK
@given(st.dictionaries(KEYS | st.text(max_size=6), TREES, max_size=5), st.booleans())
def test_any_structure(tree: dict[str, Any], lenient: bool) -> None:
    before = copy.deepcopy(tree)
    consistent(examine(tree, lenient=lenient))
    assert repr(tree) == repr(before)


@QUICK
@given(st.sampled_from(PATHS), TREES)
def test_any_value_at_any_key(path: tuple[str | int, ...], value: Any) -> None:
    tree: Any = value
    for part in reversed(path):
        tree = {str(part): tree}
    consistent(examine(tree))


@QUICK
@given(st.sampled_from(PATHS), SCALARS, st.sampled_from(VALID))
def test_any_override_and_any_value_for_auto(path: tuple[str | int, ...], value: Any, tree: dict[str, Any]) -> None:
    name = ".".join(str(part) for part in path)
    consistent(examine(tree, overrides=[f"{name}={value}"]))
    consistent(examine(tree, overrides={name: value}))
    consistent(examine({**tree, str(path[0]): "auto"}, auto={str(path[0]): value}))


@QUICK
@given(
    st.sampled_from([*OPTIMIZER_PARAMS, *SCHEDULER_PARAMS, "adamw", "a.b"]),
    st.dictionaries(st.sampled_from(ARGUMENTS), SCALARS | st.lists(SCALARS, max_size=3), max_size=3),
)
def test_any_constructor_argument(name: str, params: dict[str, Any]) -> None:
    consistent(examine({"scheduler" if name in SCHEDULER_PARAMS else "optimizer": {"type": name, "params": params}}))


@QUICK
@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    read_text(text)
    read_text("{" + text)
    read_text('{"a": ' + text + "}")


@QUICK
@given(st.sampled_from(VALID), st.randoms(use_true_random=False))
def test_damaged_text(tree: dict[str, Any], stream: random.Random) -> None:
    text = json.dumps(tree, indent=1)
    for _ in range(stream.randint(1, 4)):
        at = stream.randrange(len(text) + 1)
        piece = stream.choice(
            ["", "{", "}", "[", "]", '"', ",", ":", "//", "/*", "True", "\n", "\\", "NaN", "1e", "{{", "'"]
        )
        text = text[:at] + piece + text[at + stream.randint(0, 3) :]
    document = read_text(text)
    assert document.complete or document.problems


@QUICK
@given(st.sampled_from(VALID), st.randoms(use_true_random=False))
def test_damaged_trees(tree: dict[str, Any], stream: random.Random) -> None:
    """A valid config with one key renamed, moved, or given a value of another type."""
    damaged = copy.deepcopy(tree)
    homes = [damaged, *(value for value in damaged.values() if isinstance(value, dict))]
    home = stream.choice(homes)
    if not home:
        return
    key = stream.choice(sorted(home))
    value = home.pop(key)
    other = stream.choice(homes)
    other[stream.choice([key, key + "x", key[:-1] or "y"])] = stream.choice(
        [value, [value], {"a": value}, str(value), None, -1, {}]
    )
    consistent(examine(damaged))


@QUICK
@given(st.sampled_from([tree for tree in VALID if tree]), st.randoms(use_true_random=False))
def test_a_key_written_twice(tree: dict[str, Any], stream: random.Random) -> None:
    """In whatever object, and with whatever value: one problem, which names both lines."""
    lines = json.dumps(tree, indent=1).splitlines()
    first = stream.choice([at for at, line in enumerate(lines) if '": ' in line])
    key = lines[first].strip().partition('": ')[0][1:]
    lines.insert(first, f'"{key}": 1,')
    twice = [problem for problem in read_text("\n".join(lines)).problems if "written twice" in problem.message]
    assert [problem.message for problem in twice] == [f"the key is written twice, on lines {first + 1} and {first + 2}"]


@QUICK
@given(st.sampled_from([tree for tree in VALID if tree]), st.randoms(use_true_random=False))
def test_one_letter_in_a_valid_config(tree: dict[str, Any], stream: random.Random) -> None:
    """The key that a letter was changed in is named, and the rest of the file is still judged."""
    damaged = copy.deepcopy(tree)
    homes = [damaged, *(value for name, value in damaged.items() if isinstance(value, dict) and name != "amp")]
    home = stream.choice([home for home in homes if home])
    key = stream.choice(sorted(home))
    wrong = typo(key, stream)
    if wrong in home or not wrong or wrong[0] in "_/$" or wrong in known_paths():
        return
    home[wrong] = home.pop(key)
    found = examine(damaged)
    consistent(found)
    told = {problem.path for problem in found.problems} | {note.path for note in found.notes}
    assert any(path.split(".")[-1] == wrong for path in told)
