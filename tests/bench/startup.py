"""Start-up: how long `import engine` takes, and how long until `engine.initialize` is ready.

    python -m tests.bench.startup --rounds 5

Each figure is the median over fresh interpreters. The second is to be compared with what nobody can avoid: importing
torch and its FSDP, and building the same model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

from tests.bench.process import REPOSITORY, machine_facts, publish

IMPORT_ENGINE = "import engine"
IMPORT_TORCH = """
import torch, torch.distributed.fsdp
model = torch.nn.Linear(8, 8)
"""
WITH_OPTIMIZER = (
    IMPORT_TORCH
    + """
torch.optim.AdamW(model.parameters())  # the first optimizer of a process loads torch._dynamo, whoever builds it
"""
)
INITIALIZE = """
import torch, engine
model = torch.nn.Linear(8, 8)
engine.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
})
"""
PRINT_SECONDS = """
import os, time
begin = time.perf_counter()
{code}
print(time.perf_counter() - begin, flush=True)
os._exit(0)
"""


def seconds(code: str) -> float:
    """What ``code`` takes in a fresh interpreter, without the interpreter's own start."""
    command = [sys.executable, "-c", PRINT_SECONDS.format(code=code)]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(finished.stderr)
    return float(finished.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.startup", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the table here as Markdown")
    args = parser.parse_args()
    names = {"import engine": IMPORT_ENGINE, "torch and FSDP": IMPORT_TORCH}
    names |= {"torch, FSDP and a first optimizer": WITH_OPTIMIZER, "engine.initialize": INITIALIZE}
    runs: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, code in names.items():
            runs[name].append(seconds(code))
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    lines = ["# Start-up", "", f"Median of {args.rounds} fresh interpreters each, interleaved. {facts}.", ""]
    lines += ["| until | seconds (min..max) |", "| --- | --- |"]
    lines += [f"| {name} | {median(each):.3f} ({min(each):.3f}..{max(each):.3f}) |" for name, each in runs.items()]
    text = "\n".join(lines) + "\n"
    publish(text, args.output)


if __name__ == "__main__":
    main()
