"""One rank of one run on a slow network: ``-m tests.bench.slow_network_rank JOB_AS_JSON FOLDER``.

Leaves FOLDER/rankN.json: for each step its seconds, what the ledger counted, and the interface's counter at the marks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import engine
from tests.bench.workload import Workload, batches, build_model
from tests.network import sent_bytes

INTERFACE = "eth0"


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    workload, rank = Workload.from_json(job["workload"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_batch_size,
        "optimizer": job["optimizer"],
        "zero_optimization": {"stage": 0},
        "steps_per_print": 1_000_000,
        **job["config"],
    }
    model = build_model(workload)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    model_engine, *_ = engine.initialize(model=model, config=config)
    steps, marks = [], {}

    def mark(step: int) -> None:
        """All ranks are here, and what they have sent before has arrived."""
        if step in job["marks"]:
            if dist.is_initialized():
                dist.barrier()
            marks[step] = sent_bytes(INTERFACE)

    for number, window in enumerate(windows(workload, model_engine)):
        mark(number)
        started, cpu = time.perf_counter(), time.process_time()
        model_engine.train_batch(iter(window))
        report = model_engine.last_report
        assert report is not None
        spent = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        steps.append({**spent, "ledger_bytes": report.comm_bytes, "loss": report.loss})
    mark(workload.num_steps)
    figures = {"steps": steps, "marks": marks, "num_elements": num_elements}
    (Path(sys.argv[2]) / f"rank{rank}.json").write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # gloo's threads now and then hang in the interpreter's own teardown


def windows(workload: Workload, model_engine: engine.Engine) -> list[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step: this rank's own; under a pipeline those of all ranks, in turn."""
    mesh = model_engine.mesh
    of_ranks = range(mesh.world_size) if mesh.degrees["pp"] > 1 else [mesh.rank]
    together = zip(*(batches(workload, rank) for rank in of_ranks), strict=True)
    return [[micro for own in step for micro in own] for step in together]


if __name__ == "__main__":
    main()
