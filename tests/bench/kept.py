"""Runs of ranks whose figures are kept in a file each, so that a benchmark that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness import launch_script


def file_of(results: Path, name: str, given: str) -> Path:
    """Where the figures of ``name`` for ``given`` are."""
    return results / f"{name}-{hashlib.sha256(given.encode()).hexdigest()[:12]}.json"


def figures(path: Path, num_ranks: int, module: str, arguments: Sequence[str], timeout_seconds: float) -> Any:
    """Read where an earlier run has left them, else of ``module`` on ``num_ranks`` ranks, which gets ``arguments`` and
    ``path``, and calls `leave` there. Raises RuntimeError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            finished = launch_script(
                num_ranks, ["-m", module, *arguments, str(path.resolve())], timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{path.stem}: no result within {timeout_seconds:g} s") from None
        if not path.exists():
            raise RuntimeError(f"{path.stem} ended with {finished.returncode}\n{finished.stderr[-3000:]}")
    return json.loads(path.read_text())


def leave(path: str, found: Any) -> None:
    """Of one rank: write its figures, whole or not at all."""
    partial = Path(path + ".partial")
    partial.write_text(json.dumps(found))
    partial.replace(path)
