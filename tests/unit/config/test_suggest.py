"""Suggestions for unknown keys: every known key, misspelled by one letter, leads back to itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from engine.config import examine
from engine.config.config import Config
from engine.config.fields import section_of
from engine.config.places import Path, join_path
from engine.config.suggest import MEANT, distance, known_paths, nearest, repair_for
from engine.config.walk import is_comment

LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"
TYPOS_PER_KEY = 2


def keys(model: type[BaseModel] = Config, path: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Every key that stands in plain sections, with the section it stands in."""
    for key, info in model.model_fields.items():
        yield (*path, key), model
        section = section_of(info.annotation)
        if section is not None and not {"list", "dict"} & set(str(info.annotation).replace("[", " ").split()):
            yield from keys(section, (*path, key))


def typo(word: str, stream: random.Random) -> str:
    at = stream.randrange(len(word))
    letter = stream.choice(LETTERS)
    return {
        "drop": word[:at] + word[at + 1 :],
        "add": word[:at] + letter + word[at:],
        "replace": word[:at] + letter + word[at + 1 :],
        "swap": word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
    }[stream.choice(["drop", "add", "replace", "swap"])]


def nest(path: Path, value: object) -> dict[str, object]:
    for part in reversed(path):
        value = {str(part): value}
    assert isinstance(value, dict)
    return value


def test_one_letter_typos_are_caught_and_the_right_key_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    stream = random.Random(0)
    caught = right = tried = 0
    missed = []
    for path, model in keys():
        key = str(path[-1])
        for _ in range(TYPOS_PER_KEY):
            wrong = typo(key, stream)
            if wrong in model.model_fields or not wrong or is_comment(wrong) or model.model_config["extra"] == "allow":
                continue
            found = examine(nest((*path[:-1], wrong), {} if section_of(model.model_fields[key].annotation) else 1))
            problems = [problem for problem in found.problems if problem.code == "unknown-key"]
            noted = [note for note in found.notes if note.path == join_path((*path[:-1], wrong))]
            tried += 1
            caught += bool(problems or noted)
            suggested = any(problem.repair == f"did you mean {join_path(path)}?" for problem in problems)
            right += suggested or bool(noted)
            if not suggested:
                missed.append(f"{join_path(path)} as {wrong}")
    with capsys.disabled():
        print(f"\n{tried} one-letter typos: {caught} caught, the right key suggested for {right / tried:.1%}")
    assert caught == tried
    assert right / tried >= 0.95, missed


def test_distance_counts_single_letter_changes() -> None:
    for one, other, expected in [
        ("stage", "stage", 0),
        ("stag", "stage", 1),
        ("stagee", "stage", 1),
        ("stege", "stage", 1),
        ("satge", "stage", 1),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
    ]:
        assert distance(one, other) == distance(other, one) == expected
    for one, other in itertools.product(["fp16", "bf16", "seed", "model"], repeat=2):
        assert (distance(one, other) == 0) == (one == other)


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert nearest("flash_attention", ["seed", "stage", "optimizer"]) is None
    assert repair_for(("flash_attention",), Config.model_fields) == ""


@pytest.mark.parametrize("word", ["Zero_Optimization", "zero-optimization", "ZERO OPTIMIZATION"])
def test_capitals_and_dashes_are_seen_through(word: str) -> None:
    assert repair_for((word,), Config.model_fields) == "did you mean zero_optimization?"


@pytest.mark.parametrize("target", sorted(set(MEANT.values())))
def test_every_meaning_leads_to_a_key_that_exists(target: str) -> None:
    section, _, key = target.rpartition(".")
    if section in ("optimizer.params", "scheduler.params"):
        section, key = section.split(".")
    assert section in known_paths()[key]
