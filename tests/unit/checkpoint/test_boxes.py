from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.boxes import flat_range_boxes, inside, intersect, partition_fault, relative, show

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def shape_and_range(draw):
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@st.composite
def boxes_of(draw, shape):
    offsets = tuple(draw(st.integers(0, extent)) for extent in shape)
    return offsets, tuple(draw(st.integers(0, extent - offset)) for extent, offset in zip(shape, offsets, strict=True))


def slices(box):
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def fewest_by_trying(shape, start, stop):
    """The least number of boxes that are consecutive runs of the flat data, by dynamic programming over all runs."""
    flat = numpy.arange(prod(shape)).reshape(shape)

    def is_box(first, last):
        where = numpy.argwhere((flat >= first) & (flat < last))
        return prod((where.max(axis=0) - where.min(axis=0) + 1).tolist()) == last - first

    best = {start: 0}
    for last in range(start + 1, stop + 1):
        best[last] = 1 + min(best[first] for first in range(start, last) if is_box(first, last))
    return best[stop]


@settings(max_examples=150, deadline=None)
@given(shape_and_range())
def test_flat_range_boxes_are_consecutive_slices_of_the_flat_data(case):
    shape, start, stop = case
    flat = numpy.arange(prod(shape)).reshape(shape)
    boxes = flat_range_boxes(shape, start, stop)
    assert all(inside(box, shape) and 0 not in box[1] for box in boxes)
    covered = [value for box in boxes for value in flat[slices(box)].ravel().tolist()]
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@settings(max_examples=60, deadline=None)
@given(shape_and_range())
def test_flat_range_boxes_are_the_fewest(case):
    shape, start, stop = case
    if prod(shape) <= 40:
        assert len(flat_range_boxes(shape, start, stop)) == fewest_by_trying(shape, start, stop)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((), 0, 1, [((), ())]),
        ((), 0, 0, []),
        ((0, 3), 0, 0, []),
        ((7,), 2, 5, [((2,), (3,))]),
        ((4, 3), 0, 12, [((0, 0), (4, 3))]),
        ((4, 3), 2, 10, [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]),
    ],
)
def test_flat_range_boxes_by_example(shape, start, stop, expected):
    assert flat_range_boxes(shape, start, stop) == expected


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_flat_range_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(ValueError, match=r"not inside a tensor of shape \(2, 3\)"):
        flat_range_boxes((2, 3), start, stop)


@settings(max_examples=150, deadline=None)
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape), boxes_of(shape))))
def test_intersection_equals_the_intersection_of_masks(case):
    shape, first, second = case
    masks = []
    for box in (first, second):
        mask = numpy.zeros(shape, bool)
        mask[slices(box)] = True
        masks.append(mask)
    common = intersect(first, second)
    found = numpy.zeros(shape, bool)
    if common is not None:
        found[slices(common)] = True
        assert numpy.arange(prod(shape)).reshape(shape)[slices(first)][slices(relative(common, first[0]))].size
    assert (found == (masks[0] & masks[1])).all()
    assert (common is None) == (not found.any())


@settings(max_examples=150, deadline=None)
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_of(shape), max_size=5))))
def test_partition_fault_agrees_with_counting(case):
    shape, boxes = case
    boxes = [box for box in boxes if 0 not in box[1]]
    count = numpy.zeros(shape, int)
    for box in boxes:
        count[slices(box)] += 1
    assert (partition_fault(shape, boxes) is None) == bool((count == 1).all())


def test_a_flat_partition_is_a_partition():
    cuts = [0, 5, 5, 17, 30]
    boxes = [box for start, stop in pairwise(cuts) for box in flat_range_boxes((5, 6), start, stop)]
    assert partition_fault((5, 6), boxes) is None
    assert partition_fault((5, 6), boxes[1:]) == "5 of its 30 elements are given by no rank"


def test_show():
    assert show(((0, 3), (4, 4))) == "[0:4,3:7]"
    assert show(((), ())) == "[]"
