"""The index of a data set's difficulties: written by `ptrain analyze`, read by the sampler as memory maps.

A folder holds ``index.json`` (the data set's hash and size, the metrics) and one folder per metric:

=============================== =============================================================================
``sample_to_metric.npy``        int64 (samples,): the metric of every sample
``index_to_metric.npy``         int64 (values,): the values that occur, ascending
``index_to_sample.npy``         int64 (samples,): sample ids, by value, then by id
``index_to_sample_offsets.npy`` int64 (values + 1,): where each value's samples begin in it
``histogram.png``               how often each value occurs, where matplotlib is there
=============================== =============================================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.contracts import EngineError
from engine.data.sequences import named_tensors
from engine.data.tokens import TokenBlocks
from engine.plan.plan import CurriculumMetric

FORMAT = 1
DESCRIPTION = "index.json"
SAMPLE_TO_METRIC, INDEX_TO_METRIC = "sample_to_metric.npy", "index_to_metric.npy"
INDEX_TO_SAMPLE, OFFSETS = "index_to_sample.npy", "index_to_sample_offsets.npy"
WHOLE_BYTES = 1 << 28
"""Token files up to this size are hashed whole; of larger ones, and of other data sets, parts."""
NUM_PROBES = 1024

REPAIR = "run: ptrain analyze CONFIG"


class MetricIndex:
    """One metric of every sample, memory-mapped. Raises EngineError where the folder holds no such index."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        try:
            self.sample_to_metric: NDArray[np.int64] = np.load(folder / SAMPLE_TO_METRIC, mmap_mode="r")
            self.index_to_metric: NDArray[np.int64] = np.load(folder / INDEX_TO_METRIC, mmap_mode="r")
            self.index_to_sample: NDArray[np.int64] = np.load(folder / INDEX_TO_SAMPLE, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise EngineError(
                f"curriculum: the index of {name} in {folder} cannot be read: {error}; {REPAIR}"
            ) from error
        self.num_samples = len(self.sample_to_metric)

    @property
    def smallest(self) -> int:
        return int(self.index_to_metric[0])

    @property
    def largest(self) -> int:
        return int(self.index_to_metric[-1])

    def up_to(self, value: float) -> NDArray[np.bool_]:
        """(samples,): whose metric is at most ``value``."""
        return np.asarray(self.sample_to_metric <= value)

    def easiest(self, percentile: float, num_percentiles: float) -> NDArray[np.bool_]:
        """(samples,): the first in the sorted order, samples // num_percentiles per percentile; all at the last."""
        share = self.num_samples // int(num_percentiles)
        count = self.num_samples if percentile >= num_percentiles else int(percentile) * share
        found = np.zeros(self.num_samples, dtype=bool)
        found[self.index_to_sample[:count]] = True
        return found


def open_indexes(
    folder: Path, metrics: tuple[CurriculumMetric, ...], dataset: Any, base: Path
) -> dict[str, MetricIndex]:
    """The indexes of ``metrics``; paths of their own count from ``base``.

    Raises EngineError for a metric that the index lacks, and for an index of another data set.
    """
    found: dict[str, MetricIndex] = {}
    descriptions: dict[Path, Mapping[str, Any]] = {}
    for metric in metrics:
        own = _own_folder(metric, base)
        place = own if own is not None else folder / metric.name
        description = descriptions.setdefault(place.parent, read_description(place.parent))
        if own is None and metric.name not in description["metrics"]:
            there = ", ".join(description["metrics"]) or "none"
            raise EngineError(
                f"{metric.path}: the index in {folder} has no metric {metric.name!r}; it has: {there}; {REPAIR}"
            )
        found[metric.name] = MetricIndex(place, metric.name)
    expected = dataset_hash(dataset)
    for place, description in descriptions.items():
        if description["dataset_hash"] != expected or description["num_samples"] != len(dataset):
            raise EngineError(
                f"curriculum: the index in {place} is of another data set: {description['num_samples']} samples with "
                f"hash {description['dataset_hash']}, here {len(dataset)} with {expected}; {REPAIR}"
            )
    return found


def _own_folder(metric: CurriculumMetric, base: Path) -> Path | None:
    """Where the metric's section puts it; both of its paths must say the same."""
    folders = set()
    for path, file_name in (
        (metric.index_to_sample_path, INDEX_TO_SAMPLE),
        (metric.index_to_metric_path, INDEX_TO_METRIC),
    ):
        if path is None:
            continue
        place = base / Path(path).expanduser()
        if place.name != file_name:
            raise EngineError(
                f"{metric.path}: {path} is no {file_name}: an index of DeepSpeed's analyzer cannot be read here; "
                f"{REPAIR} and leave the path out"
            )
        folders.add(place.parent)
    if len(folders) > 1:
        raise EngineError(f"{metric.path}: its two paths lie in different folders, {' and '.join(map(str, folders))}")
    return folders.pop() if folders else None


def read_description(folder: Path) -> dict[str, Any]:
    """``index.json``. Raises EngineError where there is none, or it cannot be read."""
    path = folder / DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if description["format"] != FORMAT:
            raise EngineError(f"curriculum: {path} has format {description['format']}, not {FORMAT}; {REPAIR}")
        description["dataset_hash"], description["num_samples"], description["metrics"]
    except FileNotFoundError:
        raise EngineError(f"curriculum: there is no index of the data in {folder}; {REPAIR}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"curriculum: {path} cannot be read: {error}; {REPAIR}") from error
    return description


def dataset_hash(dataset: Any) -> str:
    """16 hex digits that differ for other data. Of tokens up to 256 MiB all count, else 1024 samples spread evenly."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{len(dataset)}".encode())
    if isinstance(dataset, TokenBlocks):
        digest.update(f"{dataset.sequence_length} {dataset.tokens.dtype.str}".encode())
        if dataset.tokens.nbytes <= WHOLE_BYTES:
            digest.update(np.ascontiguousarray(dataset.tokens).data)
            return digest.hexdigest()
    for place in np.unique(np.linspace(0, len(dataset) - 1, NUM_PROBES).astype(np.int64)).tolist():
        sample = dataset[place]
        for name, tensor in named_tensors(sample).items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if not named_tensors(sample):
            digest.update(repr(sample).encode())
    return digest.hexdigest()
