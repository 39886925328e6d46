"""How long `ptrain analyze` takes: the built-in metrics of a million samples of 128 tokens, by 2 processes.

    python -m tests.bench.analysis --output docs/benchmarks/analysis.md

The tokens are random, of a vocabulary of 50257, in a memory-mapped file like a `.bin` of `data.path`. One process that
measures a tenth of it first tells the CPU time, which a busy machine changes less. The bar is 60 s.
Exit code 1: it was missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from engine.data.analysis import Workers, analyze
from engine.data.difficulty import Metric
from engine.data.tokens import TokenBlocks
from tests.bench.process import machine_facts, publish

BAR_SECONDS = 60.0
VOCABULARY_SIZE = 50257
METRICS = ("seqlen", "vocabularyrarity")


def write_tokens(path: Path, num_tokens: int) -> None:
    generator, step = np.random.default_rng(0), 1 << 22
    with path.open("wb") as file:
        for start in range(0, num_tokens, step):
            # words are not equally frequent: the square of a uniform number prefers small ids
            uniform = generator.random(min(step, num_tokens - start), np.float32)
            file.write((VOCABULARY_SIZE * uniform * uniform).astype("<u2").tobytes())


def measure(num_samples: int, length: int, num_processes: int) -> tuple[float, float]:
    """Seconds on the clock, and of CPU time of this process alone."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        path = Path(name) / "tokens.bin"
        write_tokens(path, num_samples * length + 1)
        dataset = TokenBlocks(np.memmap(path, dtype="<u2", mode="r"), length)
        assert len(dataset) == num_samples
        wall, cpu = time.perf_counter(), time.process_time()
        analyze(dataset, [Metric(metric) for metric in METRICS], Path(name) / "index", Workers(num_processes))
        return time.perf_counter() - wall, time.process_time() - cpu


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.analysis", description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the page here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    part = args.samples // 10
    rows: list[tuple[int, int, float, float | None]] = [(part, 1, *measure(part, args.length, 1))]
    rows.append((args.samples, args.workers, measure(args.samples, args.length, args.workers)[0], None))
    wall = rows[-1][2]
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts().items())
    lines = [
        "# Measuring a data set",
        "",
        f"Written by `python -m tests.bench.analysis` (it says how it measures). {facts}, load at the end "
        f"{os.getloadavg()[0]:.1f}. Metrics: {', '.join(METRICS)}; {args.length} tokens a sample.",
        "",
        "| samples | processes | wall clock, s | CPU time, s | bar, s | |",
        "|" + " --- |" * 6,
    ]
    for samples, processes, seconds, cpu in rows:
        bar = (
            f"{BAR_SECONDS:.0f} | {'met' if seconds <= BAR_SECONDS else 'not met'}"
            if samples == args.samples
            else " | "
        )
        lines.append(
            f"| {samples:,} | {processes} | {seconds:.1f} | {'' if cpu is None else format(cpu, '.1f')} | {bar} |"
        )
    publish("\n".join([*lines, ""]), args.output)
    return 0 if wall <= BAR_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
