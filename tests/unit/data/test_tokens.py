from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contracts import EngineError
from engine.data import tokens as token_streams
from engine.data.tokens import TokenBlocks, bigram_entropy

# --- blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3)])
def test_blocks_are_as_many_as_have_their_labels(num_tokens: int, num_blocks: int) -> None:
    assert len(TokenBlocks(np.arange(num_tokens, dtype=np.uint8), 4)) == num_blocks


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_block_is_its_tokens_and_the_same_shifted_by_one(dtype: Any) -> None:
    blocks = TokenBlocks(np.arange(10, 20, dtype=dtype), 3)
    items = [blocks[index] for index in range(len(blocks))]
    assert [(item["input_ids"].tolist(), item["labels"].tolist()) for item in items] == [
        ([10, 11, 12], [11, 12, 13]), ([13, 14, 15], [14, 15, 16]), ([16, 17, 18], [17, 18, 19]),
    ]  # fmt: skip
    assert {tensor.dtype for tensor in blocks[0].values()} == {torch.int64}
    for index in (-1, 3):
        with pytest.raises(IndexError):
            blocks[index]


def test_blocks_need_a_length() -> None:
    with pytest.raises(EngineError, match="sequence_length is 0"):
        TokenBlocks(np.zeros(4, np.uint8), 0)


# --- entropy -----------------------------------------------------------------------------------------------


def slow_entropy(tokens: list[int]) -> float:
    pairs = Counter(pairwise(tokens))
    previous = Counter(tokens[:-1])
    total = len(tokens) - 1
    return -sum(count / total * float(np.log(count / previous[first])) for (first, _), count in pairs.items())


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=2, max_size=60), step=st.sampled_from([1, 40, 13_000]),
    chunk=st.integers(1, 70),
)  # fmt: skip
def test_bigram_entropy_against_counting_by_hand(tokens: list[int], step: int, chunk: int) -> None:
    tokens = [token * step for token in tokens]
    whole = token_streams.CHUNK_TOKENS
    token_streams.CHUNK_TOKENS = chunk
    try:
        for dtype in (np.uint8, np.uint16, np.uint32):
            if max(tokens) <= np.iinfo(dtype).max:
                assert bigram_entropy(np.array(tokens, dtype)) == pytest.approx(slow_entropy(tokens), abs=1e-12)
    finally:
        token_streams.CHUNK_TOKENS = whole


def test_bigram_entropy_of_known_texts() -> None:
    assert bigram_entropy(np.frombuffer(b"abababab", np.uint8)) == 0.0
    fair = np.random.default_rng(0).integers(0, 4, 200_000).astype(np.uint16)
    assert bigram_entropy(fair) == pytest.approx(np.log(4), abs=1e-3)
    with pytest.raises(EngineError, match="at least 2 tokens"):
        bigram_entropy(np.zeros(1, np.uint8))


def test_no_bigram_model_beats_the_entropy() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 6, 500).astype(np.uint8)
    counts = np.zeros((6, 6))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    bound = bigram_entropy(tokens)
    for noise in (0.0, 0.1, 1.0):
        table = counts + noise * rng.random((6, 6)) + 1e-9
        loss = -np.log((table / table.sum(1, keepdims=True))[tokens[:-1], tokens[1:]]).mean()
        assert loss >= bound - 1e-9
        assert (loss == pytest.approx(bound, abs=1e-6)) == (noise == 0.0)
