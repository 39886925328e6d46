"""`ptrain analyze`: measure every sample of a data set once, and index the samples by difficulty.

Map: the data set is cut into chunks of a fixed number of samples; workers and ranks take chunks and leave one file for
each, so what was done before an interruption is not done again, and nothing depends on who did it. Reduce: the first
rank puts the chunks together in their order (engine/data/difficulty_index.py describes the result).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.contracts import EngineError, RunFailed
from engine.data.difficulty import RARITY, Metric, measure, rarity_table, token_rows
from engine.data.difficulty_index import (
    DESCRIPTION,
    FORMAT,
    INDEX_TO_METRIC,
    INDEX_TO_SAMPLE,
    OFFSETS,
    SAMPLE_TO_METRIC,
    dataset_hash,
)

CHUNK_SAMPLES = 1 << 14
PARTS = "parts"
Progress = Callable[[str, int, int], None]
"""Called with what is measured, the chunks that are done, and all of them."""


@dataclass(frozen=True)
class Workers:
    """Who analyzes: this rank of ``world_size``, with ``num_processes`` of its own. ``barrier`` waits for all ranks."""

    num_processes: int = 1
    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], None] = lambda: None


def analyze(
    dataset: Any,
    metrics: Sequence[Metric],
    folder: Path,
    workers: Workers | None = None,
    progress: Progress = lambda what, done, total: None,
    chunk_samples: int = CHUNK_SAMPLES,
) -> Path:
    """Index ``dataset`` (with ``__getitem__`` and ``__len__``) by ``metrics`` under ``folder``, which is returned.

    The result depends on data and metrics alone. Raises EngineError for a data set that cannot be indexed, and for
    samples that a metric does not measure.
    """
    workers = workers or Workers()
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise EngineError(f"analyze: {type(dataset).__name__} is iterable only; it needs __getitem__ and __len__")
    if not len(dataset):
        raise EngineError("analyze: the data set is empty")
    parts = folder / PARTS
    key = {
        "dataset_hash": dataset_hash(dataset),
        "num_samples": len(dataset),
        "chunk_samples": chunk_samples,
        "metrics": [[metric.name, _function_name(metric)] for metric in metrics],
    }
    if workers.rank == 0:
        _keep_or_clear(parts, key)
    workers.barrier()
    run = partial(_run_chunks, dataset=dataset, parts=parts, workers=workers, chunk_samples=chunk_samples)
    table: NDArray[np.float64] | None = None
    if any(metric.name == RARITY and metric.function is None for metric in metrics):
        run(_count_tokens, "token counts", progress=progress)
        workers.barrier()
        table = rarity_table(_sum_counts(parts, _num_chunks(len(dataset), chunk_samples)))
    for metric in metrics:
        run(partial(_measure, metric=metric, table=table), metric.name, progress=progress)
    workers.barrier()
    if workers.rank == 0:
        _reduce(folder, parts, metrics, key)
    workers.barrier()
    return folder


def _function_name(metric: Metric) -> str | None:
    """Its place and a hash of its source: what an older version of it measured is not kept."""
    function = metric.function
    if function is None:
        return None
    try:
        source = hashlib.blake2b(inspect.getsource(function).encode(), digest_size=4).hexdigest()
    except (OSError, TypeError):
        source = "unknown"
    return f"{function.__module__}:{getattr(function, '__qualname__', function)} ({source})"


def _keep_or_clear(parts: Path, key: dict[str, Any]) -> None:
    """What an interrupted run left stays if it was about the same."""
    path = parts / "key.json"
    try:
        same = json.loads(path.read_text("utf-8")) == key
    except (OSError, ValueError):
        same = False
    if not same:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(key), "utf-8")


# --- map -------------------------------------------------------------------------------------------------------


def _num_chunks(num_samples: int, chunk_samples: int) -> int:
    return -(-num_samples // chunk_samples)


def _run_chunks(
    function: Callable[..., NDArray[Any]],
    what: str,
    *,
    dataset: Any,
    parts: Path,
    workers: Workers,
    chunk_samples: int,
    progress: Progress,
) -> None:
    total = _num_chunks(len(dataset), chunk_samples)
    mine = range(workers.rank, total, workers.world_size)
    missing = [chunk for chunk in mine if not _part(parts, what, chunk).exists()]
    done = len(mine) - len(missing)
    progress(what, done, len(mine))
    work = partial(_do_chunk, function, dataset, parts, what, chunk_samples)
    if workers.num_processes == 1 or len(missing) < 2:
        for chunk in missing:
            work(chunk)
            done += 1
            progress(what, done, len(mine))
        return
    with _pool(min(workers.num_processes, len(missing))) as pool:
        try:
            for finished in as_completed([pool.submit(work, chunk) for chunk in missing]):
                finished.result()
                done += 1
                progress(what, done, len(mine))
        except BrokenProcessPool:
            raise RunFailed(
                f"{what}: one of {workers.num_processes} worker processes ended without a result, {done} of "
                f"{len(mine)} chunks done. What it printed stands above; the kernel may have ended it for want of "
                'memory, and a script that calls analyze() needs its `if __name__ == "__main__":`. The same call '
                "goes on from here; fewer workers need less memory"
            ) from None


@contextmanager
def _pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Processes of a fork server: a forked copy of a process that runs gloo's or torch's threads may deadlock."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    pool = ProcessPoolExecutor(num_processes, mp_context=context)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _do_chunk(
    function: Callable[..., NDArray[Any]], dataset: Any, parts: Path, what: str, chunk_samples: int, chunk: int
) -> None:
    start = chunk * chunk_samples
    result = function(dataset, start, min(start + chunk_samples, len(dataset)))
    _write(_part(parts, what, chunk), result)


def _part(parts: Path, what: str, chunk: int) -> Path:
    return parts / f"{what.replace('/', '_').replace(' ', '_')}-{chunk:06d}.npy"


def _write(path: Path, values: NDArray[Any]) -> None:
    """Whole or not there."""
    partial_path = path.with_name(f".{path.name}.{os.getpid()}")
    with partial_path.open("wb") as file:
        np.save(file, values)
    partial_path.replace(path)


def _count_tokens(dataset: Any, start: int, stop: int) -> NDArray[np.int64]:
    flat = token_rows(dataset, start, stop).flat
    if len(flat) and int(flat.min()) < 0:
        raise EngineError(f"analyze: a token id is negative ({int(flat.min())}) in the samples {start} to {stop - 1}")
    return np.bincount(flat).astype(np.int64)


def _measure(
    dataset: Any, start: int, stop: int, *, metric: Metric, table: NDArray[np.float64] | None
) -> NDArray[np.int64]:
    return measure(metric, dataset, start, stop, table)


# --- reduce ----------------------------------------------------------------------------------------------------


def _sum_counts(parts: Path, num_chunks: int) -> NDArray[np.int64]:
    counts = [np.load(_part(parts, "token counts", chunk)) for chunk in range(num_chunks)]
    total = np.zeros(max(map(len, counts)), dtype=np.int64)
    for count in counts:
        total[: len(count)] += count
    return total


def _reduce(folder: Path, parts: Path, metrics: Sequence[Metric], key: dict[str, Any]) -> None:
    num_chunks = _num_chunks(key["num_samples"], key["chunk_samples"])
    described = {}
    for metric in metrics:
        values = np.concatenate([np.load(_part(parts, metric.name, chunk)) for chunk in range(num_chunks)])
        order = np.argsort(values, kind="stable").astype(np.int64)
        distinct, first = np.unique(values[order], return_index=True)
        own = folder / metric.name
        own.mkdir(parents=True, exist_ok=True)
        _write(own / SAMPLE_TO_METRIC, values)
        _write(own / INDEX_TO_METRIC, distinct)
        _write(own / INDEX_TO_SAMPLE, order)
        _write(own / OFFSETS, np.append(first, len(values)).astype(np.int64))
        described[metric.name] = {
            "function": _function_name(metric),
            "smallest": int(distinct[0]),
            "largest": int(distinct[-1]),
            "mean": float(values.mean()),
        }
    description = {
        "format": FORMAT,
        "dataset_hash": key["dataset_hash"],
        "num_samples": key["num_samples"],
        "metrics": described,
    }
    temporary = folder / f".{DESCRIPTION}.{os.getpid()}"
    temporary.write_text(json.dumps(description, indent=2) + "\n", "utf-8")
    temporary.replace(folder / DESCRIPTION)
    shutil.rmtree(parts)
