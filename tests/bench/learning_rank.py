"""One rank of the benchmark of what curricula and dropping save (tests/bench/learning.py).

    -m tests.bench.learning_rank train RUN_AS_JSON FILE      one run; rank 0 leaves its losses in FILE
    -m tests.bench.learning_rank time  RUNS_AS_JSON FILE     one step of each run in turn; rank 0 leaves the seconds

The example's GPT on the example's text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset

import engine
from engine.cli.training_loop import evaluation_batches
from engine.data.sources import TextCorpus, open_text
from tests.bench.kept import leave
from tests.parity.toy import gpt_class


def start(run: dict[str, Any], corpus: TextCorpus) -> Any:
    torch.manual_seed(run["config"]["seed"])
    model_engine, *_ = engine.initialize(
        model=gpt_class()(**run["model"]), config=run["config"], training_data=corpus.train
    )
    return model_engine


def train(run: dict[str, Any], corpus: TextCorpus) -> dict[str, Any]:
    """Losses of every step and of the held-out text. A run that cannot go on ends there, and says why."""
    model_engine = start(run, corpus)
    mesh, micro_batch = model_engine.mesh, model_engine.train_micro_batch_size_per_gpu()

    def validation_loss(num_samples: int) -> float:
        """Of samples spread evenly over those that the final loss is of."""
        spread = Subset(corpus.validation, range(0, run["num_final_samples"], run["num_final_samples"] // num_samples))
        num_micro_batches = num_samples // (micro_batch * mesh.dp_size)
        batches = evaluation_batches(spread, num_micro_batches, micro_batch, mesh.dp_rank, mesh.dp_size)
        return float(model_engine.eval_batch(batches, num_micro_batches))

    losses: list[float] = []
    curve: list[tuple[int, int, float]] = []
    ended = ""
    seconds = 0.0
    for step in range(1, run["num_steps"] + 1):
        started = time.perf_counter()
        try:
            losses.append(float(model_engine.train_batch()))
        except engine.EngineError as error:
            ended = str(error)
            break
        seconds += time.perf_counter() - started
        if step % run["eval_interval"] == 0 or step == run["num_steps"]:
            curve.append((step, model_engine.global_tokens, validation_loss(run["num_curve_samples"])))
    return {
        "validation_loss": None if ended else validation_loss(run["num_final_samples"]),
        "curve": curve,
        "losses": losses,
        "tokens_seen": model_engine.global_tokens,
        "tokens_computed": model_engine.tokens_computed,
        "seconds": seconds,
        "ended": ended,
    }


def times(runs: Sequence[dict[str, Any]], corpus: TextCorpus) -> dict[str, list[list[float]]]:
    """Per turn the seconds of one step of each run, on the clock ("wall") and of this rank's CPU time ("cpu").

    In turn k of K every run stands at k/K of its own steps, so that the turns' mean is the run's mean step, and a ratio
    compares neighbours in time.
    """
    engines = [start(run, corpus) for run in runs]
    num_turns = runs[0]["num_turns"]
    seconds: dict[str, list[list[float]]] = {"wall": [], "cpu": []}
    for turn in range(num_turns):
        wall, cpu = [0.0] * len(runs), [0.0] * len(runs)
        order = [(turn + index) % len(runs) for index in range(len(runs))]
        for index in order:
            model_engine = engines[index]
            model_engine.global_steps = int((turn + 0.5) / num_turns * runs[index]["num_steps"])
            dist.barrier()
            started, cpu_before = time.perf_counter(), time.process_time()
            model_engine.train_batch()
            dist.barrier()
            wall[index], cpu[index] = time.perf_counter() - started, time.process_time() - cpu_before
        seconds["wall"].append(wall)
        seconds["cpu"].append(cpu)
    return seconds


def main() -> None:
    what, text, path = sys.argv[1:]
    given = json.loads(text)
    torch.set_num_threads(1)
    sequence_length = (given if what == "train" else given[0])["model"]["sequence_length"]
    corpus = open_text(None, sequence_length)
    if what == "time":
        dist.init_process_group("gloo")
    found = train(given, corpus) if what == "train" else times(given, corpus)
    if not dist.is_initialized() or dist.get_rank() == 0:
        leave(path, found)
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then hang in the interpreter's own teardown


if __name__ == "__main__":
    main()
