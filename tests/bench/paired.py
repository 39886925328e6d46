"""Rows side by side in one process group: one step of each in turn, so that a ratio compares neighbouring steps.

    python -m tests.bench.paired --size tiny --steps 200 --rows ddp,engine-s0,hand-s0

Two starts of the same row can differ by a fifth in step time on a small machine (where the kernel puts the ranks, how
warm it is), which hides what a small model's step costs beside another's. Here all rows live in the same two processes
and alternate, step by step, in an order that turns round; the ratio of a row is the median over the turns of its step
to the base row's step of the same turn. Memory and start-up cannot be told apart here: run.py measures them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bench.process import machine_facts
from tests.bench.rows import BASE, ROWS
from tests.bench.workload import WORKLOADS, Workload, batches, build_model
from tests.harness import launch_script

RESAMPLES = 1000
LOCAL_ROWS = [name for name, row in ROWS.items() if not row.needs_deepspeed]


def rank_main(rows: list[str], workload: Workload, folder: Path) -> None:
    """One rank: every turn trains one step of each row. Leaves the seconds of each step in FOLDER/rankN.json."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps = {}
    for name in rows:
        ROWS[name].load()
        steps[name] = ROWS[name].setup(build_model(workload), workload)
    wall: dict[str, list[float]] = {name: [] for name in rows}
    cpu: dict[str, list[float]] = {name: [] for name in rows}
    for turn, micro_batches in enumerate(batches(workload, rank)):
        shift = turn % len(rows)
        for name in rows[shift:] + rows[:shift]:
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            steps[name](micro_batches)
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - cpu_started)
    (folder / f"rank{rank}.json").write_text(json.dumps({"wall": wall, "cpu": cpu}))
    dist.barrier()
    os._exit(0)  # gloo's threads now and then hang in the interpreter's own teardown


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by resampling the turns."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def table(rows: list[str], base: str, ranks: list[dict[str, dict[str, list[float]]]], num_warmup: int) -> str:
    """A Markdown table. A step takes as long as its slowest rank; CPU time is the ranks' mean."""
    lines = [
        f"| row | step ms | step / {base} (95 %) | CPU ms/step | CPU / {base} (95 %) |",
        "| --- | --- | --- | --- | --- |",
    ]
    seconds = {
        name: (
            [max(turn) for turn in zip(*(rank["wall"][name] for rank in ranks), strict=True)][num_warmup:],
            [statistics.mean(turn) for turn in zip(*(rank["cpu"][name] for rank in ranks), strict=True)][num_warmup:],
        )
        for name in rows
    }
    for name in rows:
        cells = [name]
        for own, reference in zip(seconds[name], seconds[base], strict=True):
            ratios = [a / b for a, b in zip(own, reference, strict=True)]
            low, high = interval(ratios)
            cells += [f"{1e3 * statistics.median(own):.1f}", f"{statistics.median(ratios):.3f} ({low:.3f}..{high:.3f})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.paired", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="tiny")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[BASE, "engine-s0", "hand-s0"])
    parser.add_argument("--base", default=BASE, help="the row that ratios refer to")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--output", type=Path, help="write the table here as Markdown too")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in [*args.rows, args.base] if name not in LOCAL_ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(LOCAL_ROWS)}")
    if args.base not in args.rows:
        parser.error(f"--base {args.base} is not among --rows")
    workload = WORKLOADS[args.size].override(num_steps=args.steps, num_warmup=args.warmup)
    if args.rank_folder is not None:
        rank_main(args.rows, workload, args.rank_folder)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        given = sys.argv[1:] if argv is None else argv
        command = ["-m", "tests.bench.paired", *given, "--rank-folder", folder]
        finished = launch_script(args.ranks, command, timeout=3600)
        files = [Path(folder) / f"rank{rank}.json" for rank in range(args.ranks)]
        if finished.returncode or not all(map(Path.exists, files)):
            sys.stderr.write(finished.stderr)
            return 1
        ranks = [json.loads(file.read_text()) for file in files]
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    text = f"{args.size}, {args.ranks} ranks, {args.steps} turns of which {args.warmup} not timed; {facts}.\n\n"
    text += table(args.rows, args.base, ranks, args.warmup)
    print(text)
    if args.output:
        args.output.write_text("# Rows in turn, in one process group\n\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
