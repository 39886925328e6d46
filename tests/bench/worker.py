"""One rank of one measured run. torchrun starts it: ``-m tests.bench.worker ROW WORKLOAD_AS_JSON FOLDER``.

Every rank leaves its figures in FOLDER/rankN.json; run.py puts them together.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # every optimizer loads it at its first step: it belongs to the imports
import torch.distributed as dist

from tests.bench.process import age_seconds, memory_mib
from tests.bench.rows import ROWS
from tests.bench.workload import Workload, batches, build_model


def main() -> None:
    name, workload_json, folder = sys.argv[1:]
    row, workload, rank = ROWS[name], Workload.from_json(workload_json), int(os.environ["RANK"])
    torch.set_num_threads(1)
    row.load()
    imports_mib, imports_seconds = memory_mib("VmRSS"), age_seconds()

    steps = batches(workload, rank)
    train_step = row.setup(build_model(workload), workload)
    losses, wall_seconds, cpu_seconds = [], [], []
    first_step_seconds = 0.0
    for micro_batches in steps:
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(train_step(micro_batches))
        wall_seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
        first_step_seconds = first_step_seconds or age_seconds()

    figures = {
        "step_seconds": statistics.median(wall_seconds[workload.num_warmup :]),
        "step_cpu_seconds": statistics.median(cpu_seconds[workload.num_warmup :]),
        "memory_over_imports_mib": memory_mib("VmHWM") - imports_mib,
        "imports_seconds": imports_seconds,
        "startup_seconds": first_step_seconds,
        "losses": losses,
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads now and then hang in the interpreter's own teardown, and nothing is left to clean up.
    os._exit(0)


if __name__ == "__main__":
    main()
