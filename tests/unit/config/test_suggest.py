"""Suggestions for unknown keys: every known key, misspelled by one letter, leads back to itself."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterator
from typing import get_origin

import pytest
from pydantic import BaseModel

from engine.config import examine
from engine.config.config import Config
from engine.config.fields import members, section_of
from engine.config.places import Path, join_path
from engine.config.sections.arguments import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from engine.config.suggest import MEANT, distance, known_paths, nearest, repair_for
from engine.config.walk import is_comment

LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"
TYPOS_PER_KEY = 3
ANY_NAME = "any_name"


def keys(model: type[BaseModel] = Config, path: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Every key that stands in plain sections, with the section it stands in."""
    return ((where, owner) for where, owner in every_key(model, path) if not {0, ANY_NAME} & set(where))


def every_key(model: type[BaseModel] = Config, path: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Every key, also in sections that are items of a list (0) or stand under free names (`ANY_NAME`)."""
    for key, info in model.model_fields.items():
        here = (*path, key)
        yield here, model
        section = section_of(info.annotation)
        if section is not None:
            kinds = {get_origin(kind) for kind in members(info.annotation)}
            inner = (0,) if list in kinds else (ANY_NAME,) if dict in kinds else ()
            yield from every_key(section, (*here, *inner))


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
        value = [value] if isinstance(part, int) else {str(part): value}
    assert isinstance(value, dict)
    return value


def test_one_letter_typos_are_caught_and_the_right_key_is_suggested(figure: Callable[[str], None]) -> None:
    """Every key at every level, and every argument of every optimizer and schedule."""
    stream = random.Random(0)
    tried = right = 0
    silent, missed = [], []
    for path, siblings, tree_of in [*section_keys(), *arguments()]:
        key = str(path[-1])
        for _ in range(TYPOS_PER_KEY):
            wrong = typo(key, stream)
            if wrong in siblings or not wrong or is_comment(wrong):
                continue
            found = examine(tree_of(wrong))
            spelled = join_path((*path[:-1], wrong))
            told = [problem.repair for problem in found.problems if problem.path == spelled]
            noted = [note for note in found.notes if note.path == spelled]
            tried += 1
            right += bool(noted) or any(key in repair.replace("?", "").replace(".", " ").split() for repair in told)
            if not told and not noted:
                silent.append(spelled)
            elif not noted and not any(key in repair.replace("?", "").replace(".", " ").split() for repair in told):
                missed.append(f"{join_path(path)} as {wrong}: {told}")
    figure(f"{tried} one-letter typos: {len(silent)} unnoticed, the right key suggested for {right / tried:.1%}")
    assert silent == []
    assert right / tried >= 0.95, missed


Misspelled = tuple[Path, Collection[str], Callable[[str], dict[str, object]]]


def section_keys() -> Iterator[Misspelled]:
    """Path of a key, the keys beside it, and a tree in which a word stands in its place."""
    for path, model in every_key():
        if model.model_config["extra"] == "allow":
            continue
        value: object = {} if section_of(model.model_fields[str(path[-1])].annotation) else 1
        yield path, model.model_fields, functools.partial(_misspelled, path[:-1], value)


def _misspelled(above: Path, value: object, word: str) -> dict[str, object]:
    return nest((*above, word), value)


def arguments() -> Iterator[Misspelled]:
    for section, table in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", SCHEDULER_PARAMS)):
        for name, keys in table.items():
            for key in keys:
                yield (section, "params", key), keys, functools.partial(_misspelled_argument, section, name)


def _misspelled_argument(section: str, name: str, word: str) -> dict[str, object]:
    return {section: {"type": name, "params": {word: 1}}}


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
    assert repair_for(("quantum_foam",), Config.model_fields).repair == ""


@pytest.mark.parametrize("word", ["Zero_Optimization", "zero-optimization", "ZERO OPTIMIZATION"])
def test_capitals_and_dashes_are_seen_through(word: str) -> None:
    assert repair_for((word,), Config.model_fields).repair == "did you mean zero_optimization?"


@pytest.mark.parametrize("target", sorted(set(MEANT.values())))
def test_every_meaning_leads_to_a_key_that_exists(target: str) -> None:
    section, _, key = target.rpartition(".")
    if section in ("optimizer.params", "scheduler.params"):
        section, key = section.split(".")
    assert section in known_paths()[key]
