"""The verdicts on configs that people published, where a folder of them is at hand; it is no part of this repository.

``python -m tests.public_configs`` writes docs/public_configs.md. The folder is `FOLDER`: files ``configs/*.json``, and
``index.tsv`` with one line per file, whose last column is what DeepSpeed's own parser says of it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import Examination, Problem, examine
from engine.plan import Verdict, verdict

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("PTRAIN_CORPUS", REPOSITORY.parent / "shared" / "corpus"))
PAGE = REPOSITORY / "docs" / "public_configs.md"

KINDS = {
    "valid": "valid",
    "needs-values": "valid, needs values",
    "not-built": "valid, not built here",
    "invalid": "invalid",
}
REASONS = {
    "placeholder": "a template whose placeholders are not filled in",
    "unknown-key": "a key that does not exist there: DeepSpeed ignores or refuses it",
    "unknown-argument": "an argument that the optimizer or schedule does not have",
    "batch-arithmetic": "batch sizes that fit no number of ranks",
    "conflict": "keys that contradict each other",
    "value": "a value that the key does not take: DeepSpeed replaces or ignores it",
}
"""Why a config is invalid, by the kind of its problem."""


@dataclass(frozen=True)
class Judged:
    """One file: what was read, the verdict, and what DeepSpeed's parser says."""

    name: str
    path: Path
    read: Examination
    verdict: Verdict
    deepspeed: str


def available() -> bool:
    return (FOLDER / "configs").is_dir()


def judge_all() -> tuple[list[Judged], float]:
    """Every file of the folder, by name, and the seconds it took."""
    lines = (FOLDER / "index.tsv").read_text("utf-8").splitlines()[1:]
    deepspeed = {columns[0]: columns[-1].strip() for columns in (line.split("\t") for line in lines)}
    began = time.perf_counter()
    judged = []
    for path in sorted((FOLDER / "configs").glob("*.json")):
        read = examine(path)
        judged.append(Judged(path.stem, path, read, verdict(read), deepspeed[path.stem]))
    return judged, time.perf_counter() - began


def reason(problem: Problem) -> str:
    """The kind of a problem, a key of `REASONS`."""
    if problem.path == "train_batch_size" and "placeholder" not in problem.message:
        return "batch-arithmetic"
    code = problem.code.replace("_", "-")
    if code == "unknown-key" and ".params." in problem.path:
        return "unknown-argument"
    return code


def render(judged: Iterable[Judged]) -> str:
    """The page as Markdown."""
    files = list(judged)
    kinds = Counter(one.verdict.kind for one in files)
    lines = [
        "# Configs that people published",
        "",
        "<!-- Written by `python -m tests.public_configs` where a folder of such configs is at hand. -->",
        "",
        f"{len(files)} DeepSpeed configs from public repositories, as they stand there, and what `ptrain validate`",
        "says of them. A file can have several reasons. No key that means nothing passes without a word, and no file",
        "that DeepSpeed accepts is refused unless DeepSpeed ignores, replaces or later refuses something in it.",
        "",
        *_table("verdict", "files", ((name, kinds[kind]) for kind, name in KINDS.items())),
        "",
        "## Why a config is invalid",
        "",
    ]
    reasons = Counter(kind for one in files for kind in {reason(problem) for problem in one.verdict.problems})
    lines += _table("reason", "files", ((REASONS[kind], count) for kind, count in reasons.most_common()))
    lines += ["", "## Which values are still needed", "", 'They say "auto", or no batch size is given.', ""]
    lines += _table("key", "files", _counted(one.verdict.needs_values for one in files))
    lines += ["", "## Which features are not built here", ""]
    lines += _table("switched on by", "files", _counted(one.verdict.not_built for one in files))
    return "\n".join(lines) + "\n"


def _counted(paths: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, int]]:
    counts = Counter(path for group in paths for path in group)
    for path, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        yield f"`{path}`", count


def _table(left: str, right: str, rows: Iterable[tuple[str, int]]) -> list[str]:
    return [f"| {left} | {right} |", "|---|---|", *(f"| {name} | {count} |" for name, count in rows)]


if __name__ == "__main__":
    PAGE.write_text(render(judge_all()[0]), "utf-8")
