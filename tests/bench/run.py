"""Engines side by side: the same GPT, tokens, AdamW and clipping on gloo ranks of one thread each.

    python -m tests.bench.run --size tiny --rounds 5 --rows ddp,fsdp2-s3,engine-s3
    python -m tests.bench.run --size medium --micro-batch 1 --deepspeed-python PATH

Every run is a process group of its own, started by torchrun. Rounds are interleaved (A B C, A B C, ...), so that a slow
spell of the machine meets every row; a ratio compares two runs of one round. Prefer tables in which others used few
cores: wall times of a busy machine say little, CPU times and memory remain.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.process import children_cpu_seconds, machine_busy_seconds, machine_facts
from tests.bench.rows import ROWS
from tests.bench.table import markdown
from tests.bench.workload import WORKLOADS, Workload
from tests.harness import launch_script

QUIET_CORES = 0.15


def measure(name: str, workload: Workload, num_ranks: int, python: str, timeout_seconds: float) -> dict[str, Any]:
    """One run of one row: its figures over all ranks, or ``{"error": ...}``."""
    start, busy, own = time.monotonic(), machine_busy_seconds(), children_cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = ["-m", "tests.bench.worker", name, workload.to_json(), folder]
        try:
            finished = launch_script(num_ranks, command, timeout=timeout_seconds, python=python)
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {timeout_seconds:g} s"}
        files = [Path(folder) / f"rank{rank}.json" for rank in range(num_ranks)]
        if finished.returncode or not all(map(Path.exists, files)):
            return {"error": first_error(finished.stderr) or f"exit code {finished.returncode}"}
        ranks = [json.loads(file.read_text()) for file in files]
    others = (machine_busy_seconds() - busy) - (children_cpu_seconds() - own)
    tokens = num_ranks * workload.micro_batch_size * workload.sequence_length * workload.accumulation_steps
    step_seconds = max(rank["step_seconds"] for rank in ranks)
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "step_cpu_seconds": sum(rank["step_cpu_seconds"] for rank in ranks) / num_ranks,
        "memory_over_imports_mib": max(rank["memory_over_imports_mib"] for rank in ranks),
        "imports_seconds": max(rank["imports_seconds"] for rank in ranks),
        "startup_seconds": max(rank["startup_seconds"] for rank in ranks),
        "losses": [sum(losses) / num_ranks for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
        "cores_of_others": max(0.0, others / (time.monotonic() - start)),
    }


def first_error(stderr: str) -> str:
    """The first line that names an exception: what follows it is torchrun's account of the same."""
    for line in stderr.splitlines():
        text = line.partition("]:")[2].strip() if line.startswith("[rank") else line.strip()
        kind = text.partition(":")[0]
        if " " not in kind and kind.endswith(("Error", "Exception", "Failed")):
            return text[:300]
    return ""


def wait_for_quiet(limit_seconds: float) -> None:
    """Wait until nobody else uses the machine, at most this long."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        busy = machine_busy_seconds()
        time.sleep(2)
        if machine_busy_seconds() - busy < 2 * QUIET_CORES:
            return


def measure_rounds(args: argparse.Namespace, workload: Workload) -> dict[str, list[dict[str, Any]]]:
    """``args.rounds`` runs of every row. A row that fails is not tried again. Ctrl-C ends early with what there is."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.rows}
    try:
        for round_index in range(args.rounds):
            for name, results in runs.items():
                if results and "error" in results[-1]:
                    continue
                wait_for_quiet(args.wait_quiet)
                python = args.deepspeed_python if ROWS[name].needs_deepspeed else sys.executable
                results.append(measure(name, workload, args.ranks, python, args.timeout))
                shown = results[-1].get("error") or f"{1e3 * results[-1]['step_seconds']:.1f} ms/step"
                print(f"{workload.size} round {round_index + 1} {name}: {shown}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: the table shows the runs so far", file=sys.stderr)
    return runs


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", action="append", choices=sorted(WORKLOADS), help="may be repeated (default: tiny)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=lambda text: text.split(","), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, help="sequences per rank and micro-step")
    parser.add_argument("--accumulation", type=int, help="micro-steps per step")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup", type=int, help="leading steps that are not timed")
    parser.add_argument("--deepspeed-python", help="the interpreter of an environment that has DeepSpeed")
    parser.add_argument("--wait-quiet", type=float, default=60, metavar="SECONDS", help="wait for an idle machine")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one run")
    parser.add_argument("--output", type=Path, help="write the tables here as Markdown, and as JSON beside it")
    args = parser.parse_args(argv)
    if args.rows is None:
        args.rows = [name for name, row in ROWS.items() if args.deepspeed_python or not row.needs_deepspeed]
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if not args.deepspeed_python and any(ROWS[name].needs_deepspeed for name in args.rows):
        parser.error("the deepspeed rows need --deepspeed-python")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    facts = machine_facts()
    tables = []
    for size in args.size or ["tiny"]:
        workload = WORKLOADS[size].override(
            micro_batch_size=args.micro_batch,
            accumulation_steps=args.accumulation,
            num_steps=args.steps,
            num_warmup=args.warmup,
        )
        runs = measure_rounds(args, workload)
        tables.append({"workload": asdict(workload), "ranks": args.ranks, "runs": runs})
    text = markdown(facts, tables)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)
        args.output.with_suffix(".json").write_text(json.dumps({"facts": facts, "tables": tables}, indent=1) + "\n")
        print(f"written to {args.output}", file=sys.stderr)
    failed = any("error" in run for table in tables for runs in table["runs"].values() for run in runs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
