"""Configs that people published: each gets the verdict that public_configs.tsv says a careful user would give.

The table names, by file, the paths of the problems, the values that are still needed, and the features that are
switched on and were not built when it was written. Without the folder of configs (tests/public_configs.py) these tests
are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.config.built import NOT_BUILT
from engine.config.schema import json_schema
from tests.public_configs import PAGE, Judged, available, judge_all, render
from tests.unit.config.test_fuzz import consistent

pytestmark = pytest.mark.skipif(not available(), reason="the folder of public configs is not here")

LIMIT_SECONDS = 60.0


def table() -> dict[str, tuple[list[str], list[str], list[str]]]:
    rows = Path(__file__).with_name("public_configs.tsv").read_text("utf-8").splitlines()[1:]
    cells = (row.split("\t") for row in rows)
    return {name: tuple([] if cell == "-" else cell.split() for cell in rest) for name, *rest in cells}  # type: ignore[misc]


EXPECTED = table()


@cache
def all_judged() -> tuple[dict[str, Judged], float]:
    files, seconds = judge_all()
    return {one.name: one for one in files}, seconds


@pytest.fixture
def judged() -> dict[str, Judged]:
    return all_judged()[0]


def test_the_table_names_every_file(figure: Callable[[str], None]) -> None:
    found, seconds = all_judged()
    figure(f"{len(found)} public configs judged in {seconds:.2f} s")
    assert found.keys() == EXPECTED.keys()
    assert seconds < LIMIT_SECONDS


@pytest.mark.parametrize("name", EXPECTED)
def test_the_verdict_is_a_careful_users(judged: dict[str, Judged], name: str) -> None:
    problems, needs_values, features = EXPECTED[name]
    found = judged[name].verdict
    not_built = [path for path in features if path in NOT_BUILT]
    assert [problem.path for problem in found.problems] == problems
    assert list(found.needs_values) == needs_values
    assert list(found.not_built) == not_built
    kind = "invalid" if problems else "not-built" if not_built else "needs-values" if needs_values else "valid"
    assert found.kind == kind


def test_every_problem_has_its_place_and_every_answer_is_consistent(judged: dict[str, Judged]) -> None:
    for one in judged.values():
        consistent(one.read)
        for problem in one.verdict.problems:
            assert problem.file == str(one.path)
            assert problem.line is not None, problem.render()
            assert problem.column is not None, problem.render()
            assert problem.repair or problem.allowed, problem.render()


def test_what_deepspeed_accepts_is_refused_only_where_it_ignores_something(judged: dict[str, Judged]) -> None:
    for one in judged.values():
        if one.deepspeed == "OK" and one.verdict.kind == "invalid":
            said = [problem.render() for problem in one.verdict.problems]
            assert any("DeepSpeed" in text for text in said), said


def test_no_unknown_key_passes_in_silence(judged: dict[str, Judged]) -> None:
    """The schema is the judge of what is known; the files that are plain JSON are read without the project's reader."""
    schema = json_schema()
    checked = 0
    for one in judged.values():
        try:
            tree = json.loads(one.path.read_text("utf-8"))
        except ValueError:
            continue
        spoken_of = {part.path for part in (*one.verdict.problems, *one.verdict.notes)}
        for path in unknown_keys(tree, schema, schema, ()):
            assert any(".".join(path[:end]) in spoken_of for end in range(1, len(path) + 1)), f"{one.name}: {path}"
        checked += 1
    assert checked > 100


def unknown_keys(value: Any, node: Any, root: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of keys for which the schema has no property."""
    options = [resolve(option, root) for option in (node.get("anyOf") or [node])]
    if isinstance(value, list):
        items = [option["items"] for option in options if "items" in option]
        for item in value:
            yield from unknown_keys(item, items[0], root, path) if items else ()
    if not isinstance(value, dict):
        return
    holders = [option for option in options if "properties" in option or "additionalProperties" in option]
    for key, inner in value.items():
        known = [option["properties"][key] for option in holders if option.get("properties", {}).get(key, False)]
        free = [option["additionalProperties"] for option in holders if option.get("additionalProperties")]
        if known:
            yield from unknown_keys(inner, known[0], root, (*path, key))
        elif free:
            yield from unknown_keys(inner, free[0], root, (*path, key)) if isinstance(free[0], dict) else ()
        elif not re.match("_|//|[$]schema$", key):
            yield (*path, key)


def resolve(node: Any, root: dict[str, Any]) -> Any:
    return root["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node


def test_the_page_is_fresh(judged: dict[str, Judged]) -> None:
    assert PAGE.read_text("utf-8") == render(judged.values()), "run python -m tests.public_configs"
