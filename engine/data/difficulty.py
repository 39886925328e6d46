"""What makes a sample hard, for `ptrain analyze`: its length, how rare its tokens are, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.contracts import EngineError
from engine.data.sequences import TOKEN_NAMES
from engine.data.tokens import TokenBlocks

SampleFunction = Callable[[Sequence[Any]], Any]
"""From samples of the data set, as it gives them, to one whole number each."""

LENGTH, RARITY = "seqlen", "vocabularyrarity"
BUILT_IN = (LENGTH, RARITY)
INTEGERS = NDArray[np.int64]


@dataclass(frozen=True)
class Metric:
    """``function``: None for those that are built in."""

    name: str
    function: SampleFunction | None = None

    def __post_init__(self) -> None:
        if self.function is None and self.name not in BUILT_IN:
            raise EngineError(
                f"analyze: there is no metric {self.name!r}; built in are {', '.join(BUILT_IN)}, and a function of "
                'your own is named in its section: "function": "file.py:function"'
            )


@dataclass(frozen=True)
class TokenRows:
    """The tokens of consecutive samples without padding: ``flat`` in one array, (samples,) ``lengths`` of them."""

    flat: NDArray[Any]
    lengths: INTEGERS

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(samples,): the sum of ``values``, one per token, over each sample."""
        if len(self.lengths) and (self.lengths == self.lengths[0]).all():
            return np.asarray(values.reshape(len(self.lengths), -1).sum(axis=1))
        ends = np.cumsum(self.lengths)
        return np.array([values[end - size : end].sum() for end, size in zip(ends, self.lengths, strict=True)])


def token_rows(dataset: Any, start: int, stop: int) -> TokenRows:
    """The tokens of the samples ``start`` to ``stop``. Blocks of one stream are read without touching each.

    A sample is a 1-dim integer tensor, or a dict or tuple with one (``input_ids``, else the first); where an
    ``attention_mask`` lies beside it, tokens under its zeros are padding. Raises EngineError for other samples.
    """
    if isinstance(dataset, TokenBlocks):
        size = dataset.sequence_length
        return TokenRows(dataset.tokens[start * size : stop * size], np.full(stop - start, size, dtype=np.int64))
    rows = [_tokens_of(dataset[index], index) for index in range(start, stop)]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return TokenRows(np.concatenate(rows) if rows else np.empty(0, np.int64), lengths)


def _tokens_of(sample: Any, index: int) -> NDArray[Any]:
    mask = None
    if isinstance(sample, Mapping):
        mask = sample.get("attention_mask")
        candidates = [sample[name] for name in TOKEN_NAMES if name in sample] + list(sample.values())
    else:
        candidates = list(sample) if isinstance(sample, tuple | list) and not _is_row(sample) else [sample]
    for candidate in candidates:
        if _is_row(candidate):
            row = np.asarray(candidate)
            return row if mask is None else row[np.asarray(mask).reshape(-1).astype(bool)]
    raise EngineError(
        f"analyze: sample {index} holds no tokens: a 1-dim integer tensor, or a dict or tuple with one; measure it by "
        'a function of your own ("function": "file.py:function")'
    )


def _is_row(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 1 and not value.is_floating_point() and value.dtype != torch.bool
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def rarity_table(counts: INTEGERS) -> NDArray[np.float64]:
    """(vocabulary,): ``-ln(c / C)`` of every token, c its count in the data (at least 1), C their sum."""
    seen = np.maximum(counts, 1).astype(np.float64)
    return np.asarray(-np.log(seen / seen.sum()))


def measure(metric: Metric, dataset: Any, start: int, stop: int, table: NDArray[np.float64] | None) -> INTEGERS:
    """(stop - start,): the metric of each of these samples. ``table``: of `rarity_table`, for the rarity.

    seqlen is the number of tokens that are no padding; vocabularyrarity ``trunc(sum of -ln(c(w) / C))`` over them.
    Raises EngineError where a function of the user's fails or gives anything but one whole number per sample.
    """
    if metric.function is not None:
        return _by_function(metric, [dataset[index] for index in range(start, stop)], start)
    rows = token_rows(dataset, start, stop)
    if metric.name == LENGTH:
        return rows.lengths
    assert table is not None
    return np.trunc(rows.sums(table[rows.flat])).astype(np.int64)


def _by_function(metric: Metric, samples: list[Any], start: int) -> INTEGERS:
    assert metric.function is not None
    where = f"analyze: {metric.name}: samples {start} to {start + len(samples) - 1}"
    try:
        given = metric.function(samples)
    except Exception as error:
        raise EngineError(f"{where}: the function raised {type(error).__name__}: {error}") from error
    values = np.asarray(given)
    if values.shape != (len(samples),) or values.dtype.kind not in "iuf" or (values != np.trunc(values)).any():
        raise EngineError(
            f"{where}: the function gave {values.dtype} of shape {values.shape}; wanted is one whole number for each "
            f"of the {len(samples)} samples"
        )
    return values.astype(np.int64)
