"""1-bit optimizers where they are meant for: hosts that are joined by a slow network.

    python -m tests.bench.slow_network --hosts 2 --output docs/benchmarks/slow_network.md

Each host is a network namespace on this machine with a link of 100 Mbit/s, then 1 Gbit/s, and one rank of one thread.
All train the same GPT from the same weights. At 100 Mbit/s the batch is small, so that communication dominates; at
1 Gbit/s it is larger, and beside each run there is one in which every rank trains for itself at the same time, which is
the same engine with communication switched off. Bytes are what the kernel counted on a host's interface.

Needs Linux, iproute2 and the right to make network namespaces (root, or user namespaces); else it says so and ends.
Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.hosts import Hosts, address, facts_inside, hosts
from tests.bench.page import bar_table, written_by
from tests.bench.process import publish
from tests.bench.workload import WORKLOADS, Workload

MODULE = "tests.bench.slow_network"
FREEZE_STEP = 2
UNTIMED = 1
"""Steps at the beginning of a phase that are not timed: buffers are made in them."""
MIN_TIMES_FEWER_BYTES = 28.0
MIN_SPEEDUP = 6.0
MAX_SLOWDOWN = 1.25
TCP_PORT = 29500


@dataclass(frozen=True)
class Job:
    """``timed``: the steps ``[first, stop)`` (from 0) whose time and bytes count; all later ones where the algorithm's
    rounds differ from step to step."""

    name: str
    optimizer: dict[str, Any]
    num_steps: int
    timed: tuple[int, int]
    alone: bool = False
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """``kernel_bytes`` and ``ledger_bytes``: sent by a host per timed step, the mean over hosts."""

    step_seconds: float
    cpu_seconds: float
    kernel_bytes: float
    ledger_bytes: float
    samples_per_second: float
    num_elements: int


def zero_one_rounds(params: dict[str, int], num_steps: int) -> tuple[list[int], list[int]]:
    """The steps (from 1) in which 0/1 Adam sends gradients in full, and those in which it sends 1 bit.

    Before ``var_freeze_step`` every step sends, in full at intervals that double after ``var_update_scaler`` refreshes
    each; after it 1 bit at intervals that double every ``local_step_scaler`` steps up to ``local_step_clipper``.
    """
    full, one_bit = [], []
    interval, num_refreshes = 1, 0
    local_interval, num_local = 1, 0
    for step in range(1, num_steps + 1):
        if step <= params["var_freeze_step"]:
            if step % interval:
                one_bit.append(step)
                continue
            full.append(step)
            num_refreshes += 1
            if num_refreshes == params["var_update_scaler"]:
                interval, num_refreshes = 2 * interval, 0
            continue
        if step % local_interval == 0:
            one_bit.append(step)
        num_local += 1
        if num_local == params["local_step_scaler"]:
            local_interval, num_local = min(2 * local_interval, params["local_step_clipper"]), 0
    return full, one_bit


ZERO_ONE = {"var_freeze_step": 12, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}


def jobs(num_timed: int, *, alone: bool) -> list[Job]:
    adam = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    first = FREEZE_STEP + UNTIMED
    last = first + num_timed
    freeze = {**adam, "freeze_step": FREEZE_STEP}
    frozen = ZERO_ONE["var_freeze_step"]
    both = (False, True) if alone else (False,)
    made = [Job("AdamW", {"type": "AdamW", "params": adam}, UNTIMED + 3, (UNTIMED, UNTIMED + 3))]
    for by_itself in both:
        made += [
            Job("OneBitAdam", {"type": "OneBitAdam", "params": freeze}, last, (first, last), by_itself),
            Job(
                "ZeroOneAdam",
                {"type": "ZeroOneAdam", "params": {**adam, **ZERO_ONE}},
                2 * frozen,
                (frozen + UNTIMED, 2 * frozen),
                by_itself,
            ),
            # the mean of the trust ratio has forgotten its zero after 1 / (1 - coeff_beta) steps
            Job(
                "OneBitLamb",
                {"type": "OneBitLamb", "params": {**freeze, "coeff_beta": 0.5}},
                last,
                (first, last),
                by_itself,
            ),
        ]
    return made


def run_job(job: Job, workload: Workload, network: Hosts, timeout_seconds: float) -> list[dict[str, Any]]:
    """What the ranks left behind. Raises RuntimeError with the output of the first rank that fails."""
    workload = workload.override(num_steps=job.num_steps)
    marks = sorted({0, *job.timed, job.num_steps})
    argument = json.dumps(
        {"workload": workload.to_json(), "optimizer": job.optimizer, "config": job.config, "marks": marks}
    )
    size = 1 if job.alone else network.size
    with tempfile.TemporaryDirectory(prefix="slow-network-") as folder:
        running = []
        for index in range(network.size):
            place = {"RANK": "0" if job.alone else str(index), "WORLD_SIZE": str(size)}
            place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
            place |= {"MASTER_ADDR": address(0), "MASTER_PORT": str(TCP_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
            own = Path(folder) / str(index)
            own.mkdir()
            command = [sys.executable, "-m", "tests.bench.slow_network_rank", argument, str(own)]
            running.append(network.start(index, command, place))
        try:
            outputs = [process.communicate(timeout=timeout_seconds)[0] for process in running]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{job.name}: no result within {timeout_seconds:g} s") from None
        finally:
            for process in running:
                process.kill()
                process.wait()
        for process, output in zip(running, outputs, strict=True):
            if process.returncode:
                raise RuntimeError(f"{job.name}: a rank ended with {process.returncode}\n{output[-3000:]}")
        return [json.loads(next((Path(folder) / str(i)).iterdir()).read_text()) for i in range(network.size)]


def figures(job: Job, ranks: Sequence[dict[str, Any]], workload: Workload, timed: tuple[int, int]) -> Measured:
    first, stop = timed
    num_steps = stop - first

    # steps whose rounds differ have no median that means anything; the slowest rank is the step's time
    def means(key: str) -> list[float]:
        return [statistics.fmean(rank["steps"][number][key] for number in range(first, stop)) for rank in ranks]

    seconds, cpu = max(means("seconds")), statistics.fmean(means("cpu_seconds"))
    kernel = statistics.fmean(rank["marks"][str(stop)] - rank["marks"][str(first)] for rank in ranks) / num_steps
    ledger = statistics.fmean(means("ledger_bytes"))
    samples = len(ranks) * workload.micro_batch_size / seconds
    return Measured(seconds, cpu, kernel, ledger, samples, ranks[0]["num_elements"])


def fp32_all_reduce_bytes(num_elements: int, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * 4 * num_elements


def one_bit_bytes(num_elements: int, ranks: int) -> float:
    """Signs and scales of one tensor: the ledger's closed form."""
    return 2 * (ranks - 1) / ranks * num_elements / 8 + 8 * (ranks - 1)


@dataclass(frozen=True)
class Bar:
    what: str
    found: float
    limit: str
    holds: bool

    @property
    def cells(self) -> tuple[str, str, str, bool]:
        return self.what, f"{self.found:.2f}", self.limit, self.holds


class Table:
    """One rate and one batch: its runs, printed as they come."""

    def __init__(self, rate: int, workload: Workload, network: Hosts, args: argparse.Namespace) -> None:
        self.rate, self.workload, self.ranks = rate, workload, network.size
        network.set_rate(rate)
        self.probed = statistics.median(network.measured_rate() for _ in range(3))
        self.runs: dict[tuple[str, bool], Measured] = {}
        self.whole: dict[tuple[str, bool], Measured] = {}
        for job in jobs(args.steps, alone=rate > args.rates[0]):
            if job.name not in args.optimizers:
                continue
            ranks = run_job(job, workload, network, args.timeout)
            key = job.name, job.alone
            self.runs[key] = figures(job, ranks, workload, job.timed)
            self.whole[key] = figures(job, ranks, workload, (0, job.num_steps))
            print(self.row(key), file=sys.stderr, flush=True)

    def row(self, key: tuple[str, bool]) -> str:
        found, (name, alone) = self.runs[key], key
        adamw = self.runs.get(("AdamW", False))
        cells = [
            f"{name}, each rank for itself" if alone else name,
            f"{found.samples_per_second:.2f}",
            f"{1e3 * found.step_seconds:.0f}",
            f"{1e3 * found.cpu_seconds:.0f}",
            f"{adamw.step_seconds / found.step_seconds:.2f}" if adamw and not alone else "",
            "0" if alone else f"{found.kernel_bytes:,.0f}",
            "0" if alone else f"{found.ledger_bytes:,.0f}",
            f"{self.fp32_bytes(found) / found.kernel_bytes:.1f}" if not alone else "",
        ]
        return "| " + " | ".join(cells) + " |"

    def fp32_bytes(self, found: Measured) -> float:
        return fp32_all_reduce_bytes(found.num_elements, self.ranks)

    def bars(self, slowest: bool) -> list[Bar]:
        made = []
        for (name, alone), found in self.runs.items():
            if alone or name == "AdamW":
                continue
            adamw, by_itself = self.runs.get(("AdamW", False)), self.runs.get((name, True))
            if slowest and name != "ZeroOneAdam":
                ratio = self.fp32_bytes(found) / found.kernel_bytes
                what = f"{name}: an fp32 all-reduce over the bytes of a 1-bit step"
                made.append(Bar(what, ratio, f">= {MIN_TIMES_FEWER_BYTES:g}", ratio >= MIN_TIMES_FEWER_BYTES))
            if slowest and name == "ZeroOneAdam":
                made.append(self.zero_one_bar(self.whole[name, False]))
            if slowest and adamw:
                ratio = adamw.step_seconds / found.step_seconds
                what = f"{name}: times faster than AdamW at {self.rate} Mbit/s"
                made.append(Bar(what, ratio, f">= {MIN_SPEEDUP:g}", ratio >= MIN_SPEEDUP))
            if by_itself:
                ratio = found.step_seconds / by_itself.step_seconds
                what = f"{name}: step time at {self.rate} Mbit/s over that without communication"
                made.append(Bar(what, ratio, f"<= {MAX_SLOWDOWN:g}", ratio <= MAX_SLOWDOWN))
        return made

    def zero_one_bar(self, whole: Measured) -> Bar:
        num_steps = 2 * ZERO_ONE["var_freeze_step"]
        full, one_bit = zero_one_rounds(ZERO_ONE, num_steps)
        expected = len(full) * self.fp32_bytes(whole) + len(one_bit) * one_bit_bytes(whole.num_elements, self.ranks)
        ratio = whole.kernel_bytes * num_steps / expected
        limit = 32 / MIN_TIMES_FEWER_BYTES
        what = f"ZeroOneAdam: bytes of {num_steps} steps over {len(full)} full and {len(one_bit)} 1-bit rounds"
        return Bar(what, ratio, f"1 to {limit:.2f}", 1.0 <= ratio <= limit)

    def markdown(self) -> list[str]:
        load, any_run = self.workload, next(iter(self.runs.values()))
        header = [
            "optimizer",
            "samples/s",
            "step ms",
            "CPU ms/step",
            "times AdamW",
            "bytes/step, kernel",
            "bytes/step, ledger",
        ]
        header.append("fp32 all-reduce / bytes")
        return [
            "",
            f"## {self.rate} Mbit/s",
            "",
            f"{self.ranks} hosts, {any_run.num_elements / 1e6:.1f} M parameters, micro-batch {load.micro_batch_size} x "
            f"{load.sequence_length} tokens on each; one TCP connection carries {self.probed:.0f} Mbit/s.",
            "",
            "| " + " | ".join(header) + " |",
            "|" + " --- |" * len(header),
            *map(self.row, self.runs),
        ]


def page(tables: Sequence[Table], facts: dict[str, Any]) -> tuple[str, bool]:
    bars = [bar for table in tables for bar in table.bars(slowest=table is tables[0])]
    lines = [
        "# 1-bit optimizers on slow networks",
        "",
        written_by("bench-network", MODULE, facts),
        "",
        "Times and bytes are those of the compressed stage (0/1 Adam: its local steps), as a mean per step. Bytes are "
        "what the kernel counted on a host's interface: at 100 Mbit/s with every header, above with fewer, as packets "
        "are cut by the link there.",
    ]
    for table in tables:
        lines += table.markdown()
    lines += ["", "## Bars", "", *bar_table(bar.cells for bar in bars)]
    return "\n".join(lines) + "\n", all(bar.holds for bar in bars)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument(
        "--rates",
        default="100,1000",
        type=lambda text: [int(rate) for rate in text.split(",")],
        help="Mbit/s, slowest first: it gets the small batch, the others the large one",
    )
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="small")
    parser.add_argument("--micro-batch", type=int, nargs=2, default=(1, 8), metavar=("SMALL", "LARGE"))
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each run")
    names = sorted({job.name for job in jobs(1, alone=False)})
    parser.add_argument("--optimizers", type=lambda text: text.split(","), default=names, help=",".join(names))
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one run")
    parser.add_argument("--no-bars", action="store_true", help="exit with 0 whatever the bars say")
    parser.add_argument("--output", type=Path, help="write the page here as Markdown")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    facts = facts_inside(MODULE, argv)
    if facts is None:
        return 0
    tables = []
    with hosts(args.hosts) as network:
        for index, rate in enumerate(args.rates):
            workload = WORKLOADS[args.size].override(
                micro_batch_size=args.micro_batch[min(index, 1)], sequence_length=args.sequence_length
            )
            tables.append(Table(rate, workload, network, args))
    text, good = page(tables, facts)
    publish(text, args.output)
    return 0 if good or args.no_bars else 1


if __name__ == "__main__":
    sys.exit(main())
