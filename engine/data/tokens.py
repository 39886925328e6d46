"""Token streams: arrays of unsigned integers, cut into blocks, checked, measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from engine.contracts import EngineError

Tokens = NDArray[np.unsignedinteger[Any]]

CHUNK_TOKENS = 1 << 24
"""How many tokens are looked at in one go where a whole stream is read."""


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of one token stream.

    Item ``i`` is ``{"input_ids", "labels"}``, two int64 tensors of shape (sequence_length,): the tokens from
    ``i * sequence_length`` on, and the same shifted by one. Every token but the first is a label at most once; a tail
    shorter than a block is left out. ``tokens`` stays one array of unsigned integers (often a memory map, which
    worker processes reopen instead of copying).
    """

    def __init__(self, tokens: Tokens, sequence_length: int) -> None:
        if sequence_length < 1:
            raise EngineError(f"data.sequence_length is {sequence_length}: at least 1 token is needed.")
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.sequence_length
        window = torch.from_numpy(self.tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap):
            mapped = self.tokens
            state["tokens"] = MappedTokens(
                Path(str(mapped.filename)), mapped.dtype.str, int(mapped.offset), len(mapped)
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["tokens"], MappedTokens):
            state = {**state, "tokens": state["tokens"].open()}
        self.__dict__.update(state)


@dataclass(frozen=True)
class MappedTokens:
    """A stretch of a file as an array: what a memory map is pickled as."""

    path: Path
    dtype: str
    offset_bytes: int
    num_tokens: int

    def open(self) -> Tokens:
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset_bytes, shape=(self.num_tokens,))


def check_vocabulary(tokens: Tokens, vocabulary_size: int, source: str, first_position: int = 0) -> None:
    """Raises EngineError naming the first token id that a vocabulary of ``vocabulary_size`` does not have.

    ``first_position`` is the position of ``tokens[0]`` in ``source``. Memory: one chunk of 16 Mi tokens.
    """
    if vocabulary_size > np.iinfo(tokens.dtype).max:
        return
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        if int(chunk.max()) >= vocabulary_size:
            position = int(np.argmax(chunk >= vocabulary_size))
            raise EngineError(
                f"{source}: token id {int(chunk[position])} at position {first_position + start + position} does not "
                f"exist in the model's vocabulary of {vocabulary_size} (ids 0 to {vocabulary_size - 1}): "
                f"make the vocabulary larger or the data match it."
            )


def largest_token(tokens: Tokens) -> int:
    return max((int(tokens[at : at + CHUNK_TOKENS].max()) for at in range(0, len(tokens), CHUNK_TOKENS)), default=0)


def bigram_entropy(tokens: Tokens) -> float:
    """The conditional entropy H(next | previous) of a text's own bigram counts, in nats per token.

    With c(a, b) the number of positions at which token b follows token a, c(a) the sum over b, and N = len(tokens) - 1
    pairs: ``-sum c(a, b) / N * ln(c(a, b) / c(a))``. It is the loss of the best bigram model there can be for exactly
    this text, fitted on the text itself: no model that sees one previous token gets below it, so a model that
    does has learnt from longer contexts. Counted in chunks; memory grows with the number of distinct pairs.

    Raises EngineError for fewer than two tokens.
    """
    num_pairs = len(tokens) - 1
    if num_pairs < 1:
        raise EngineError(f"a bigram entropy needs at least 2 tokens, got {len(tokens)}.")
    if tokens.dtype.itemsize == 1:
        table = np.zeros(1 << 16, dtype=np.int64)
        for keys in _pair_keys(tokens, bits=8):
            table += np.bincount(keys.astype(np.int64), minlength=1 << 16)
        pairs = np.flatnonzero(table).astype(np.uint64)
        counts, previous = table[table > 0], pairs >> np.uint64(8)
    else:
        pairs, counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        for keys in _pair_keys(tokens, bits=32):
            new_pairs, new_counts = np.unique(keys, return_counts=True)
            pairs, places = np.unique(np.concatenate([pairs, new_pairs]), return_inverse=True)
            # Sums of integers below 2^53 are exact in the float64 that bincount's weights use.
            counts = np.bincount(places, weights=np.concatenate([counts, new_counts])).astype(np.int64)
        previous = pairs >> np.uint64(32)
    _, places = np.unique(previous, return_inverse=True)
    previous_counts = np.bincount(places, weights=counts)[places]
    return float(-(counts / num_pairs * np.log(counts / previous_counts)).sum()) + 0.0


def _pair_keys(tokens: Tokens, bits: int) -> Iterator[NDArray[np.uint64]]:
    for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS + 1].astype(np.uint64)
        yield (chunk[:-1] << np.uint64(bits)) | chunk[1:]
