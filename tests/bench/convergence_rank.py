"""One rank of one run of the convergence benchmark: ``-m tests.bench.convergence_rank RUN_AS_JSON FILE``.

The example's GPT on the example's text; rank 0 leaves the validation losses in FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import engine
from engine.cli.training_loop import evaluation_batches
from engine.collectives.compressed_all_reduce import CompressedAllReduce
from engine.data.sources import open_text
from tests.bench.kept import leave
from tests.parity.toy import gpt_class


def forget_errors() -> None:
    """The variant without error feedback: what compression leaves out is lost."""
    finish = CompressedAllReduce.finish

    def finish_and_forget(self: CompressedAllReduce, x: torch.Tensor) -> None:
        finish(self, x)
        self.worker_error.zero_()
        self.server_error.zero_()

    CompressedAllReduce.finish = finish_and_forget  # type: ignore[method-assign]


def main() -> None:
    run: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if not run["error_feedback"]:
        forget_errors()
    corpus = open_text(None, run["sequence_length"])
    torch.manual_seed(run["seed"])
    model = gpt_class()(vocabulary_size=256, sequence_length=run["sequence_length"], **run["model"])
    model_engine, *_ = engine.initialize(model=model, config=run["config"], training_data=corpus.train)
    mesh, micro_batch = model_engine.mesh, model_engine.train_micro_batch_size_per_gpu()

    def validation_loss(num_samples: int) -> float:
        num_micro_batches = num_samples // (micro_batch * mesh.dp_size)
        batches = evaluation_batches(corpus.validation, num_micro_batches, micro_batch, mesh.dp_rank, mesh.dp_size)
        return float(model_engine.eval_batch(batches, num_micro_batches))

    started, curve, norms, sent = time.perf_counter(), [], [], 0
    for step in range(1, run["num_steps"] + 1):
        model_engine.train_batch()
        report = model_engine.last_report
        assert report is not None
        sent += report.comm_bytes
        norms.append(report.grad_norm)
        if step % run["eval_interval"] == 0 and step < run["num_steps"]:
            curve.append((step, validation_loss(run["num_curve_samples"])))
    final = validation_loss(run["num_final_samples"])
    curve.append((run["num_steps"], validation_loss(run["num_curve_samples"])))
    found = {
        "validation_loss": final,
        "curve": curve,
        "sent_bytes": sent,
        "mean_grad_norm": sum(norm or 0.0 for norm in norms) / len(norms),
        "seconds": time.perf_counter() - started,
    }
    if mesh.rank == 0:
        leave(sys.argv[2], found)
    model_engine.destroy()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then hang in the interpreter's own teardown


if __name__ == "__main__":
    main()
