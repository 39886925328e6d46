"""The plan against real ranks: bytes of states, activations, and collectives of a step, planned and counted.

    python -m tests.bench.plan_against_real --output docs/benchmarks/plan.md

Each row starts a config of the toy GPT on as many gloo ranks. Every rank is compared; the table shows the first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench.process import machine_facts
from tests.harness import Ranks
from tests.plan.real_counts import ROWS, STATES, Counts, counted, planned
from tests.result_file import table

ACTIVATIONS = 0.1
"""The plan's promise for activations; all else is exact."""
INTRODUCTION = """\
# The plan against real ranks

Written by `python -m tests.bench.plan_against_real`: the toy GPT of the tests (4 blocks, width 64) on gloo ranks, what
`ptrain plan` says of a step, and what the tensors and the ledger of the ranks count. One number where both are the
same, planned / counted where not; activations, which the plan promises within 10 %, always have both. States are bytes
of rank 0, collectives its calls in one step of 2 micro-batches; `equal` is of all ranks, and of calls and bytes by axis
and operation. """
COLUMNS = ("config", "ranks", *STATES, "activations", "collectives of a step", "bytes sent", "equal")


def off(expected: Counts, found: Counts) -> float:
    """By what part of the real activations the plan is off; 0 where it says nothing of them."""
    if expected.activations is None or found.activations is None:
        return 0.0
    return abs(expected.activations - found.activations) / found.activations


def differences(expected: Counts, found: Counts) -> list[str]:
    """Nothing where the plan keeps its promise for a rank."""
    lines = [
        f"{name}: {expected.states[name]} bytes planned, {found.states[name]} counted"
        for name in STATES
        if expected.states[name] != found.states[name]
    ]
    for key in sorted(expected.calls.keys() | found.calls.keys()):
        one, other = expected.calls.get(key, (0, 0)), found.calls.get(key, (0, 0))
        if one != other:
            lines.append(f"{' '.join(key)}: {one[0]} calls, {one[1]} bytes planned, {other[0]}, {other[1]} counted")
    if off(expected, found) > ACTIVATIONS:
        lines.append(f"activations: {expected.activations} bytes planned, {found.activations} counted")
    return lines


def line_of(row: str, by_plan: list[Counts], by_rank: list[Counts]) -> list[str]:
    expected, found = by_plan[0], by_rank[0]
    calls = ", ".join(f"{axis} {operation} {n}" for (axis, operation), (n, _) in sorted(found.calls.items()))
    is_equal = not any(differences(one, other) for one, other in zip(by_plan, by_rank, strict=True))
    largest = max(off(one, other) for one, other in zip(by_plan, by_rank, strict=True))
    return [
        row,
        str(len(by_rank)),
        *(_both(expected.states[name], found.states[name]) for name in STATES),
        f"{expected.activations:,} / {found.activations:,} ({largest:.1%})",
        calls,
        _both(sum(sent for _, sent in expected.calls.values()), sum(sent for _, sent in found.calls.values())),
        "yes" if is_equal else "no",
    ]


def _both(one: int, other: int) -> str:
    return f"{one:,}" if one == other else f"{one:,} / {other:,}"


def earlier(page: Path | None) -> dict[str, list[str]]:
    """The rows of a page that is there already."""
    lines = page.read_text().splitlines() if page is not None and page.exists() else []
    cells = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in lines if line.startswith("| ")]
    return {found[0]: found for found in cells if found[0] in ROWS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, help="write the page here too; rows that do not run stay as they are there"
    )
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    arguments = parser.parse_args()
    ranks, rows, wrong = Ranks(), earlier(arguments.output), []
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    page = ""
    for row, (world, config) in ROWS.items():
        if arguments.rows in row:
            by_plan, by_rank = planned(world, config), ranks(world).run(counted, config, timeout=600)
            rows[row] = line_of(row, by_plan, by_rank)
            print(" | ".join(rows[row]), file=sys.stderr, flush=True)
            wrong += [f"{row}: {line}" for line in differences(by_plan[0], by_rank[0])]
            lines = table(COLUMNS, (rows[name] for name in ROWS if name in rows))
            page = f"{INTRODUCTION}{facts}.\n\n" + "\n".join(lines) + "\n"
            if arguments.output is not None:
                arguments.output.write_text(page)
    ranks.shutdown()
    print(page)
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
