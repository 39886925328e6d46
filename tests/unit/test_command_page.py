"""docs/commands.md and docs/planning.md show what commands print: each is run, in order, and its output compared.

`PTRAIN_UPDATE_PAGES=1 python -m pytest tests/unit/test_command_page.py` writes the pages anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli.main import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "commands.md"
PLANNING = REPOSITORY / "docs" / "planning.md"
BLOCK = re.compile(r"^```bash\n(?P<commands>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
EXIT_CODES = {0: "", 1: "exit code 1\n", 2: "exit code 2\n"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: the repository's files by their names, and room for what is written."""
    made = tmp_path_factory.mktemp("page")
    for name in ("bin", "examples", "engine", "schemas"):
        (made / name).symlink_to(REPOSITORY / name)
    return made


def output_of(commands: str, folder: Path) -> str:
    printed = ""
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "bin/ptrain", line
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "bin/ptrain"), *arguments],
            cwd=folder,
            env={**os.environ, "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "Traceback" not in done.stderr
        printed += done.stdout + done.stderr + EXIT_CODES[done.returncode]
    return printed


@pytest.mark.parametrize("page", [PAGE, pytest.param(PLANNING, marks=pytest.mark.slow)], ids=lambda page: page.stem)
def test_a_page_shows_what_is_printed(page: Path, folder: Path) -> None:
    text = page.read_text("utf-8")

    def shown(match: re.Match[str]) -> str:
        return f"```bash\n{match['commands']}```\n\n```text\n{output_of(match['commands'], folder)}```\n"

    fresh = BLOCK.sub(shown, text)
    if os.environ.get("PTRAIN_UPDATE_PAGES") == "1":
        page.write_text(fresh, "utf-8")
    assert fresh == text


def test_every_command_has_its_place() -> None:
    text = PAGE.read_text("utf-8")
    for command in COMMANDS:
        assert f"`{command}`" in text or f"`ptrain {command}" in text or command == "train"
