"""What the documentation shows is true: commands run, configs load, code parses, links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.config import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")

RUN_BY_CI = {f"make {target}" for target in re.findall(r"^make (\S+)", (REPOSITORY / ".ci/run").read_text(), re.M)}
RUN_BY_HAND = {"make bench", "make bench-network", "make bench-onebit", "make composition", "make matrix"}
SHELL_ONLY = {"source .venv/bin/activate"}
"""Changes the reader's shell; `make train` makes the file."""


def blocks(language: str) -> list[tuple[str, str]]:
    """``(page, text)`` of every fenced block in that language."""
    found = []
    for page in PAGES:
        name = page.relative_to(REPOSITORY).as_posix()
        found += [(name, text) for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]
    return found


COMMAND_PAGES = ("docs/commands.md", "docs/planning.md")
"""Run in order, with their output, in test_command_page.py."""


def commands() -> list[str]:
    """Every line of a bash block, without its comment."""
    shown = [text for page, text in blocks("bash") if page not in COMMAND_PAGES]
    lines = {line.partition(" # ")[0].strip() for text in shown for line in text.splitlines()}
    return sorted(lines - {""})


def is_ptrain(command: str) -> bool:
    return command.startswith("bin/ptrain ")


def test_every_command_is_run_somewhere() -> None:
    known = RUN_BY_CI | RUN_BY_HAND | SHELL_ONLY
    assert not [command for command in commands() if command not in known and not is_ptrain(command)]


def by_tier() -> list[Any]:
    """Every command of ptrain; the first of each kind is in the quick suite."""
    shown = [command for command in commands() if is_ptrain(command)]
    first = {command.split()[1].partition("-")[0]: command for command in reversed(shown)}
    return [pytest.param(command, marks=[] if command in first.values() else pytest.mark.slow) for command in shown]


@pytest.mark.parametrize("command", by_tier())
def test_a_ptrain_command_is_accepted(command: str) -> None:
    """Training commands print their plan here; `make train` and the tests of the command line train."""
    _, *arguments = shlex.split(command)
    if arguments[0].startswith("--") and "--dry-run" not in arguments:
        arguments.append("--dry-run")
    finished = subprocess.run(
        [sys.executable, "bin/ptrain", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()


@pytest.mark.parametrize(("page", "text"), blocks("json"))
def test_a_config_is_valid(page: str, text: str) -> None:
    load_config(json.loads(text))


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_code_parses(page: str, text: str) -> None:
    ast.parse(text, filename=page)


def test_links_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for target in LINK.findall(page.read_text("utf-8")):
            if not (page.parent / target).exists():
                dead.append(f"{page.relative_to(REPOSITORY)}: {target}")
    assert not dead


def test_every_make_target_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE))
    shown = set()
    for page in PAGES:
        shown |= set(re.findall(r"`make ([a-z-]+)", page.read_text("utf-8")))
    assert shown | {command.split()[1] for command in RUN_BY_CI | RUN_BY_HAND} <= targets


def public_interface() -> set[str]:
    """The names of `engine`, the arguments of `initialize`, the fields of `StepReport`, the methods of `Engine` and of
    `Watcher`, and their arguments."""
    names = {*engine.__all__, *inspect.signature(engine.initialize).parameters, *engine.StepReport.__dataclass_fields__}
    for kind in (*engine.Engine.__mro__[:-1], engine.Watcher):
        for name, member in vars(kind).items():
            if not name.startswith("_"):
                names.add(name)
                if kind is not engine.Watcher and inspect.isfunction(member):
                    names |= {*inspect.signature(member).parameters} - {"self", "args", "kwargs"}
    return names


def test_the_whole_python_interface_is_documented() -> None:
    text = (REPOSITORY / "docs" / "api.md").read_text("utf-8")
    prose = FENCE.sub("", text)
    assert not public_interface() - set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
