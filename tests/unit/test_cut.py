"""Which elements each rank holds, and how parts become whole again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cut import Cut


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any),
    st.integers(1, 5),
    st.integers(0, 2),
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
)
def test_parts_are_the_whole(segments, size, dimension, others):
    shape = (*others[:dimension], sum(segments), *others[dimension:])
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    cuts = [Cut(shape, dimension, tuple(segments), size, rank) for rank in range(size)]
    parts = [cut.part(whole) for cut in cuts]
    assert [tuple(part.shape) for part in parts] == [cut.shape for cut in cuts]
    assert torch.equal(cuts[0].join(parts), whole)
    rebuilt = torch.full_like(whole, -1)
    for cut, part in zip(cuts, parts, strict=True):
        for first, start, length in cut.boxes(0, cut.extent()):
            rebuilt.narrow(dimension, start, length).copy_(part.narrow(dimension, first, length))
    assert torch.equal(rebuilt, whole)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_segment_is_cut_as_torch_cuts(size):
    whole = torch.arange(21)
    cut = Cut((21,), 0, (21,), size, 0)
    for rank, chunk in enumerate(whole.chunk(size)):
        assert torch.equal(replace(cut, rank=rank).part(whole), chunk)


def test_each_rank_has_its_heads_of_every_segment():
    """Query, key and value of 4 heads, 2 elements each, over 2 ranks."""
    cut = Cut((24, 3), 0, (8, 8, 8), 2, 1)
    assert list(cut.ranges()) == [(0, 4, 4), (4, 12, 4), (8, 20, 4)]
    assert cut.shape == (12, 3)
    assert cut.is_even
    assert list(cut.boxes(3, 4)) == [(0, 7, 1), (1, 12, 3)]
