"""A small text, and the arguments of a small run on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.job import EXAMPLE, MODELS, SMALL, Finished, run, settings

Arguments = Callable[..., list[str]]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 kB of words in random order."""
    sentence = "the model learns what a word is made of, and then which words follow it"
    words = random.Random(0).choices(sentence.split(" "), k=12000)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(" ".join(words[at : at + 12]) for at in range(0, len(words), 12)))
    return path


@pytest.fixture(scope="session")
def small(text: Path) -> Arguments:
    """`small(output, {"a.b": value})`: the example's config, made small."""

    def arguments(output: Path, changes: dict[str, Any] | None = None, *more: str) -> list[str]:
        values = SMALL | {"data.path": str(text)} | (changes or {})
        return ["--config", str(EXAMPLE), "--output", str(output), *settings(values), *more]

    return arguments


@pytest.fixture(scope="session")
def faulty(small: Arguments) -> Arguments:
    """`faulty(output, "nan", {...})`: the same with a fault of `models.py`."""

    def arguments(output: Path, fault: str, changes: dict[str, Any] | None = None, *more: str) -> list[str]:
        target = {"model.target": f"{MODELS}:GPT", "model.args.fault": fault, "model.args.place": str(output.parent)}
        return small(output, target | (changes or {}), *more)

    return arguments


@pytest.fixture(scope="session")
def whole_run(small: Arguments, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The output of an uninterrupted run on one rank, and how it ended. Tests only read it."""
    output = tmp_path_factory.mktemp("whole") / "output"
    return output, run(small(output))


@pytest.fixture(scope="session")
def whole_run_of_two(small: Arguments, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    output = tmp_path_factory.mktemp("whole_of_two") / "output"
    return output, run(small(output, {}, "--nproc", "2"))
