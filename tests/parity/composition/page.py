"""Run the composition matrix and write its page: `make composition`, or `python -m tests.parity.composition.page`.

Cells that were measured at the same commit are not run again, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.bench.process import machine_facts
from tests.harness import Ranks
from tests.parity.composition.features import FEATURES, STEPS, Cell, cells
from tests.parity.composition.table import (
    HALF,
    MUON,
    Tolerance,
    deviation_of,
    refusals,
    tolerance_of,
)

PAGE = Path("docs/composition.md")
RECORD = Path("output/composition.jsonl")
HEAD = """# Which features go together

Look up two features, one as a row and one as a column: a number says that a run with both gives what it must, and by
how much it was off at most; a letter, that the plan refuses the pair before training, for the reason listed below; a
dash, that a run has only one of the two.

What it must give is worked out by a plain loop in one process, which knows nothing of the engine and does by hand what
each feature does (`tests/parity/composition/oracle.py`). The number is the largest absolute deviation of the reported
losses and of all parameters after {steps} steps, in which parameters move by about 0.1. {bounds}
The 1-bit optimizers average here without rounding to signs: the rounding is compared with slow optimizers of its own
(`tests/parity/test_one_bit.py`). Features that cannot be used at all are listed in
[config.md](config.md#known-not-built-here).
"""


def bounds() -> str:
    def said(tolerance: Tolerance) -> str:
        return f"{tolerance.losses:.0e} (losses) and {tolerance.parameters:.0e} (parameters)"

    return (
        f"It may be {said(Tolerance())}; {said(MUON)} for Muon, which computes in bf16; {said(HALF['bf16'])} in "
        f"bf16 and {said(HALF['fp16'])} in fp16."
    )


def rules() -> dict[str, tuple[str, list[Cell]]]:
    """Letter -> what the plan says, of the first pair, and all pairs that the rule refuses."""
    by_rule: dict[tuple[str, ...], tuple[str, list[Cell]]] = {}
    for cell in cells():
        if found := refusals(cell):
            rule = (cell.first.key, cell.second.key, *(problem.path for problem in found))
            said = "; ".join(f"{problem.path}: {problem.message}" for problem in found)
            by_rule.setdefault(rule, (said, []))[1].append(cell)
    letters = [*string.ascii_lowercase, *(a + b for a in string.ascii_lowercase for b in string.ascii_lowercase)]
    return dict(zip(letters, by_rule.values(), strict=False))


def render(measured: Mapping[str, str], facts: str) -> str:
    """``measured``: a number by the name of each cell that is not refused."""
    refused = {cell.name: letter for letter, (_, pairs) in rules().items() for cell in pairs}
    missing = [cell.name for cell in cells() if cell.name not in refused and cell.name not in measured]
    lines = [HEAD.format(steps=STEPS, bounds=bounds())]
    num_equal = len(cells()) - len(refused) - len(missing)
    rest = f"{len(missing)} (marked with ?) to be measured" if missing else "nothing else"
    lines += [f"{len(cells())} pairs: {num_equal} equal, {len(refused)} refused, {rest}. {facts}", ""]
    columns = range(1, len(FEATURES))
    lines += [f"| | {' | '.join(map(str, columns))} |", "| --- |" + " --- |" * len(columns)]
    names = {cell.name for cell in cells()}
    for row, feature in enumerate(FEATURES):
        found = []
        for other in FEATURES[:row]:
            name = Cell(other, feature).name
            found.append("-" if name not in names else refused.get(name) or measured.get(name, "?"))
        found += [""] * (len(columns) - row)
        lines.append(f"| {row + 1} {feature.name} | {' | '.join(found)} |")
    lines += ["", "## Why pairs are refused", ""]
    for letter, (sentence, pairs) in rules().items():
        lines.append(f"- **{letter}**, {'; '.join(cell.name for cell in pairs)}: `{sentence}`")
    lines += ["", "## What was run", "", "| | feature | config |", "| --- | --- | --- |"]
    for number, feature in enumerate(FEATURES, 1):
        config = f"`{json.dumps(feature.config)}`" if feature.config else ", ".join(sorted(feature.traits))
        lines.append(f"| {number} | {feature.name} | {config} |")
    return "\n".join(lines) + "\n"


def read(page: str) -> tuple[dict[str, str], str]:
    """The numbers of a page by the names of their cells, and the facts of its measurement."""
    lines = page.splitlines()
    counts = next(line for line in lines if line.endswith(".") and " pairs: " in line)
    measured = {}
    for row, feature in enumerate(FEATURES):
        line = next((line for line in lines if line.startswith(f"| {row + 1} {feature.name} |")), "")
        for other, found in zip(FEATURES[:row], line.split("|")[2:], strict=False):
            if found.strip()[:1].isdigit():
                measured[Cell(other, feature).name] = found.strip()
    return measured, counts[counts.index("Measured: ") :]


def measure(record: Path, only: str, kept: list[str]) -> dict[str, tuple[str, str]]:
    """Number and commit by the names of cells. Prints each cell as it comes; ends with all that are wrong."""
    commit = machine_facts()["commit"]
    done = {name: found for name, found in _recorded(record).items() if found[1] in (commit, *kept)}
    record.parent.mkdir(parents=True, exist_ok=True)
    wrong = []
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder, record.open("a") as lines:
        for cell in cells():
            if refusals(cell) or cell.name in done or only not in cell.name:
                continue
            try:
                deviation = deviation_of(cell, ranks, Path(folder))
            except Exception as error:
                wrong.append(f"{cell.name}: {error}")
                print(wrong[-1], flush=True)
                continue
            print(f"{cell.name}: {deviation}", flush=True)
            if not deviation.within(tolerance_of(cell)):
                wrong.append(f"{cell.name}: {deviation} is not within {tolerance_of(cell)}")
                continue
            done[cell.name] = str(deviation), commit
            lines.write(json.dumps({"cell": cell.name, "deviation": str(deviation), "commit": commit}) + "\n")
            lines.flush()
    ranks.shutdown()
    if wrong:
        raise SystemExit(f"{len(wrong)} pairs are neither equal nor refused:\n" + "\n".join(wrong))
    return done


def _recorded(record: Path) -> dict[str, tuple[str, str]]:
    lines: list[dict[str, str]] = []
    if record.exists():
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {line["cell"]: (line["deviation"], line["commit"]) for line in lines}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.composition.page", description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    parser.add_argument("--record", type=Path, default=RECORD, help="what was measured, line by line")
    parser.add_argument("--only", default="", help="measure the pairs with this in their names")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="COMMIT", help="let what was measured at that commit stand"
    )
    chosen = parser.parse_args(arguments)
    measured = measure(chosen.record, chosen.only, chosen.keep)
    counts = Counter(commit[:12] for _, commit in measured.values())
    facts = {**machine_facts(), "commit": ", ".join(f"{commit} ({count} pairs)" for commit, count in counts.items())}
    told = "Measured: " + ", ".join(f"{name} {value}" for name, value in facts.items()) + "."
    page = render({name: number for name, (number, _) in measured.items()}, told)
    chosen.output.write_text(page)
    print(next(line for line in page.splitlines() if " pairs: " in line))


if __name__ == "__main__":
    main(sys.argv[1:])
