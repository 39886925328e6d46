"""A pipeline against data parallelism where hosts are joined by a slow network.

    python -m tests.bench.pipeline_network --output docs/benchmarks/pipeline_network.md

Two hosts (tests/bench/hosts.py) with a link of 100 Mbit/s, one rank of one thread on each. The same GPT trains on the
same samples: two data-parallel ranks all-reduce all gradients once a step; two pipeline stages send hidden states and
their gradients, and the gradients of the tied embedding. Steps hold few samples, then more: what data parallelism sends
does not grow with them, what a pipeline sends does.

Needs Linux, iproute2 and the right to make network namespaces. Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.hosts import facts_inside, hosts
from tests.bench.page import bar_table, written_by
from tests.bench.process import publish
from tests.bench.slow_network import Bar, Job, Measured, figures, run_job
from tests.bench.workload import WORKLOADS, Workload

MODULE = "tests.bench.pipeline_network"
NUM_HOSTS = 2
UNTIMED = 1
MIN_SPEEDUP = 3.0
MAX_LOSS_DIFFERENCE = 1e-3
LAYOUTS = ("data parallel", "pipeline")


def job_of(layout: str, num_timed: int, accumulation: int) -> Job:
    """``accumulation``: the micro-batches of a step on one data-parallel rank; a pipeline has those of both."""
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}}
    steps = UNTIMED + num_timed
    config: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if layout == "pipeline":
        config = {"gradient_accumulation_steps": NUM_HOSTS * accumulation, "pipeline": {"stages": NUM_HOSTS}}
    return Job(layout, adam, steps, (UNTIMED, steps), config=config)


class Rows:
    """Both layouts at one number of samples a step."""

    def __init__(
        self, samples: int, workload: Workload, found: dict[str, Measured], losses: dict[str, list[float]], rate: float
    ) -> None:
        self.samples, self.workload, self.found, self.losses, self.rate = samples, workload, found, losses, rate

    @property
    def speedup(self) -> float:
        return self.found["data parallel"].step_seconds / self.found["pipeline"].step_seconds

    @property
    def loss_difference(self) -> float:
        pairs = zip(*(self.losses[layout] for layout in LAYOUTS), strict=True)
        return max(abs(one - other) / one for one, other in pairs)

    def lines(self) -> list[str]:
        return [
            f"| {self.samples} | {layout} | {1e3 * found.step_seconds:.0f} | {1e3 * found.cpu_seconds:.0f} | "
            f"{found.ledger_bytes:,.0f} | {found.kernel_bytes:,.0f} | "
            f"{8e-3 * found.kernel_bytes / self.rate:.0f} | "
            + (f"{self.speedup:.2f} |" if layout == "pipeline" else "1 |")
            for layout, found in self.found.items()
        ]

    def bars(self, is_first: bool) -> list[Bar]:
        same = self.loss_difference <= MAX_LOSS_DIFFERENCE
        made = [
            Bar(
                f"{self.samples} samples: largest relative difference of the losses, in 1/1000",
                1e3 * self.loss_difference,
                f"<= {1e3 * MAX_LOSS_DIFFERENCE:g}",
                same,
            )
        ]
        if is_first:
            what = f"{self.samples} samples: step time of data parallelism over the pipeline's"
            made.insert(0, Bar(what, self.speedup, f">= {MIN_SPEEDUP:g}", self.speedup >= MIN_SPEEDUP))
        return made


def measure(samples: int, workload: Workload, network: Any, args: argparse.Namespace) -> Rows:
    accumulation = samples // (NUM_HOSTS * workload.micro_batch_size)
    workload = workload.override(accumulation_steps=accumulation)
    rate = statistics.median(network.measured_rate() for _ in range(3))
    found, losses = {}, {}
    for layout in LAYOUTS:
        job = job_of(layout, args.steps, accumulation)
        ranks = run_job(job, workload, network, args.timeout)
        found[layout] = figures(job, ranks, workload, job.timed)
        losses[layout] = [step["loss"] for step in ranks[0]["steps"]]
        print(f"{samples} samples, {layout}: {found[layout].step_seconds:.2f} s a step", file=sys.stderr, flush=True)
    return Rows(samples, workload, found, losses, rate)


def page(tables: Sequence[Rows], args: argparse.Namespace, facts: dict[str, Any]) -> tuple[str, bool]:
    bars = [bar for rows in tables for bar in rows.bars(rows is tables[0])]
    load, any_run = tables[0].workload, tables[0].found["pipeline"]
    lines = [
        "# A pipeline on a slow network",
        "",
        written_by("bench-network", MODULE, facts),
        "",
        f"{NUM_HOSTS} hosts at {args.rate} Mbit/s, {any_run.num_elements / 1e6:.1f} M parameters, micro-batches of "
        f"{load.micro_batch_size} x {load.sequence_length} tokens; one TCP connection carries {tables[0].rate:.0f} "
        f'Mbit/s. Means of {args.steps} steps; a step takes as long as on its slowest host. "on the wire" is how long '
        "a host's bytes take at that rate: the least that a step can take without overlap of both directions.",
        "",
        "| samples a step | layout | step ms | CPU ms/step | bytes/step, ledger | bytes/step, kernel | on the wire, ms "
        "| times data parallel |",
        "|" + " --- |" * 8,
        *(line for rows in tables for line in rows.lines()),
        "",
        "## Bars",
        "",
        *bar_table(bar.cells for bar in bars),
    ]
    return "\n".join(lines) + "\n", all(bar.holds for bar in bars)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s")
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="small")
    parser.add_argument(
        "--samples",
        default="8,32",
        type=lambda text: [int(number) for number in text.split(",")],
        help="a step's, even numbers; the bar on the ratio is for the first",
    )
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each run")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one run")
    parser.add_argument("--no-bars", action="store_true", help="exit with 0 whatever the bars say")
    parser.add_argument("--output", type=Path, help="write the page here as Markdown")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    facts = facts_inside(MODULE, argv)
    if facts is None:
        return 0
    workload = WORKLOADS[args.size].override(micro_batch_size=1, sequence_length=args.sequence_length)
    with hosts(NUM_HOSTS) as network:
        network.set_rate(args.rate)
        tables = [measure(samples, workload, network, args) for samples in args.samples]
    text, good = page(tables, args, facts)
    publish(text, args.output)
    return 0 if good or args.no_bars else 1


if __name__ == "__main__":
    sys.exit(main())
