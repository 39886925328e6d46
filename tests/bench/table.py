"""Measured runs as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tests.bench.page import written_by
from tests.bench.rows import BASE

Runs = Mapping[str, Sequence[Mapping[str, Any]]]

COLUMNS = (
    "row",
    "step ms",
    f"step / {BASE} (min..max)",
    "CPU ms/step",
    f"CPU / {BASE}",
    "tokens/s",
    "MiB over imports",
    f"MiB / {BASE}",
    "start-up s",
    "final loss",
    "largest loss gap",
    "cores of others",
)


def ratios(runs: Runs, name: str, key: str) -> list[float]:
    """A row's figure over the base row's of the same round, for each round in which both ran."""
    pairs = zip(runs[name], runs.get(BASE, ()), strict=False)
    return [mine[key] / base[key] for mine, base in pairs if "error" not in mine and "error" not in base]


def loss_gap(runs: Runs, name: str) -> float | None:
    """The largest difference to the base row's losses over all steps; None without a base row."""
    base = [run for run in runs.get(BASE, ()) if "error" not in run]
    if not base:
        return None
    return max(abs(a - b) for a, b in zip(runs[name][0]["losses"], base[0]["losses"], strict=True))


def cells(runs: Runs, name: str) -> list[str]:
    """One line of the table."""
    good = [run for run in runs[name] if "error" not in run]
    if not good:
        reason = runs[name][0]["error"] if runs[name] else "not run"
        return [name, f"fails: {reason}".replace("|", "/"), *[""] * (len(COLUMNS) - 2)]

    def middle(key: str) -> float:
        return median(run[key] for run in good)

    step, cpu, memory = (
        ratios(runs, name, key) for key in ("step_seconds", "step_cpu_seconds", "memory_over_imports_mib")
    )
    gap = loss_gap(runs, name)
    return [
        name,
        f"{1e3 * middle('step_seconds'):.1f}",
        f"{median(step):.2f} ({min(step):.2f}..{max(step):.2f})" if step else "",
        f"{1e3 * middle('step_cpu_seconds'):.1f}",
        f"{median(cpu):.2f}" if cpu else "",
        f"{middle('tokens_per_second'):.0f}",
        f"{middle('memory_over_imports_mib'):.0f}",
        f"{median(memory):.2f}" if memory else "",
        f"{middle('startup_seconds'):.1f}",
        f"{good[-1]['losses'][-1]:.5f}",
        "" if gap is None else f"{gap:.1e}",
        f"{middle('cores_of_others'):.2f}",
    ]


def markdown(facts: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> str:
    """The whole page: what was measured where, then a table for each workload."""
    lines = [
        "# Engines side by side",
        "",
        written_by("bench", "tests.bench.run", facts),
    ]
    for table in tables:
        workload, runs = table["workload"], table["runs"]
        lines += [
            "",
            f"## {workload['size']}",
            "",
            f"{max(map(len, runs.values()))} rounds, {table['ranks']} ranks, fp32, "
            f"micro-batch {workload['micro_batch_size']} x {workload['sequence_length']} tokens, "
            f"{workload['accumulation_steps']} micro-steps a step, "
            f"{workload['num_steps']} steps of which {workload['num_warmup']} not timed.",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + " --- |" * len(COLUMNS),
            *("| " + " | ".join(cells(runs, name)) + " |" for name in runs),
        ]
    return "\n".join(lines) + "\n"
