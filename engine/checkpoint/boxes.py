"""Boxes: the rectangular parts of a tensor that ranks hold, save and load.

A box is ``(offsets, sizes)``: the elements ``[offsets, offsets + sizes)`` in every dimension. The only box of a 0-dim
tensor is ``((), ())``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The fewest boxes that cover elements ``[start, stop)`` of the row-major flattened tensor of ``shape``.

    In flat order: consecutive boxes are consecutive slices of the flat data, each ``prod(sizes)`` elements long.
    At most ``2 * len(shape) - 1`` of them. Raises ValueError where the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) is not inside a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    inner = tuple(shape[1:])
    stride = prod(inner)

    def within_row(row: int, first: int, last: int) -> list[Box]:
        return [((row, *offsets), (1, *sizes)) for offsets, sizes in flat_range_boxes(inner, first, last)]

    first_row, head = divmod(start, stride)
    last_row, tail = divmod(stop, stride)
    if first_row == last_row:
        return within_row(first_row, head, tail)
    boxes: list[Box] = []
    if head:
        boxes += within_row(first_row, head, stride)
        first_row += 1
    if first_row < last_row:
        boxes.append(((first_row, *(0 for _ in inner)), (last_row - first_row, *inner)))
    if tail:
        boxes += within_row(last_row, 0, tail)
    return boxes


def intersect(first: Box, second: Box) -> Box | None:
    """The common part of two boxes of one tensor, in the tensor's coordinates; None where it is empty."""
    offsets: list[int] = []
    sizes: list[int] = []
    for first_offset, first_size, second_offset, second_size in zip(*first, *second, strict=True):
        low = max(first_offset, second_offset)
        high = min(first_offset + first_size, second_offset + second_size)
        if high <= low:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return tuple(offsets), tuple(sizes)


def relative(box: Box, origin: Sequence[int]) -> Box:
    """``box`` in the coordinates of a box that begins at ``origin``."""
    return tuple(offset - base for offset, base in zip(box[0], origin, strict=True)), box[1]


def inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether ``box`` is a box of a tensor of ``shape``."""
    offsets, sizes = box
    return len(offsets) == len(sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= extent
        for offset, size, extent in zip(offsets, sizes, shape, strict=True)
    )


def partition_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why ``boxes`` (none empty, all inside) do not cover the tensor of ``shape`` exactly once; None when they do."""
    active: list[Box] = []
    for box in sorted(boxes):
        # In order of the first dimension, only boxes that still reach into this one can overlap it.
        active = [other for other in active if not shape or other[0][0] + other[1][0] > box[0][0]]
        for other in active:
            common = intersect(box, other)
            if common is not None:
                return f"elements {show(common)} are given twice"
        active.append(box)
    absent = prod(shape) - sum(prod(sizes) for _, sizes in boxes)
    return f"{absent} of its {prod(shape)} elements are given by no rank" if absent else None


def show(box: Box) -> str:
    """``box`` as slices: ``[0:4,3:7]``; ``[]`` for a scalar."""
    return "[" + ",".join(f"{offset}:{offset + size}" for offset, size in zip(*box, strict=True)) + "]"
