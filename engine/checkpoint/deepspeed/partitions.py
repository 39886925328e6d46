"""How DeepSpeed cuts parameters, as pieces of named tensors.

Stages 1 and 2: the parameters of a group lie one after the other in one flat vector, which is cut into equal parts, one
a rank (the last is padded). Stage 3: each parameter is cut on its own into ``ceil(numel / ranks)`` elements a rank, and
a rank's parts lie one after the other. Moments lie as the parameters do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from torch import Tensor

from engine.checkpoint.boxes import flat_range_boxes
from engine.checkpoint.errors import CheckpointError
from engine.contracts import Chunk

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Part:
    """``numel`` elements of parameter ``name`` (``shape``) from element ``start`` on: at ``offset`` of flat vector
    number ``vector`` of ``rank``."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    rank: int
    vector: int
    offset: int


def flat_parts(
    groups: Sequence[Shapes], part_sizes: Sequence[int], num_ranks: int, paddings: Sequence[Sequence[int]] | None
) -> Iterator[Part]:
    """Stages 1 and 2. ``part_sizes``: elements a rank of each group; ``paddings``: elements behind each parameter."""
    for vector, (shapes, size) in enumerate(zip(groups, part_sizes, strict=True)):
        begin = 0
        for index, (name, shape) in enumerate(shapes.items()):
            numel = prod(shape)
            for rank in range(num_ranks):
                low, high = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
                if low < high:
                    yield Part(name, tuple(shape), low - begin, high - low, rank, vector, low - rank * size)
            begin += numel + (paddings[vector][index] if paddings is not None else 0)


def sharded_parts(groups: Sequence[Shapes], vector_sizes: Sequence[int], num_ranks: int) -> Iterator[Part]:
    """Stage 3. ``vector_sizes``: of a rank's flat vectors, over whose borders a parameter may lie."""
    begin = 0
    for name, shape in [item for shapes in groups for item in shapes.items()]:
        numel = prod(shape)
        size = ceil(numel / num_ranks)
        border = 0
        for vector, vector_size in enumerate(vector_sizes):
            low, high = max(begin, border), min(begin + size, border + vector_size)
            for rank in range(num_ranks):
                start = rank * size + low - begin
                length = min(high - low, numel - start)
                if length > 0:
                    yield Part(name, tuple(shape), start, length, rank, vector, low - border)
            border += vector_size
        begin += size


def chunks_of(parts: Sequence[Part], vectors: Sequence[Sequence[Any]], section: str, key: str = "") -> Iterator[Chunk]:
    """The ``parts`` of ``vectors[rank][vector]`` as boxes of ``section.NAME`` (``.key``). Raises `CheckpointError`
    where a vector is too short."""
    for part in parts:
        vector = vectors[part.rank][part.vector]
        name = f"{section}.{part.name}" + (f".{key}" if key else "")
        if not isinstance(vector, Tensor) or vector.numel() < part.offset + part.numel:
            raise CheckpointError(f"{name}: rank {part.rank}'s file holds too few elements for it.")
        values = vector.reshape(-1)[part.offset : part.offset + part.numel]
        position = 0
        for offsets, sizes in flat_range_boxes(part.shape, part.start, part.start + part.numel):
            numel = prod(sizes)
            yield Chunk(name, part.shape, offsets, sizes, values[position : position + numel].view(sizes))
            position += numel


def assign_to_groups(shapes: Shapes, groups: Sequence[Sequence[tuple[int, ...]]]) -> list[list[str]] | None:
    """The names of each group's members, known by their shapes alone: members keep the model's order in their group,
    and names that are in no group are skipped. None where no way or more than one fits."""
    skips = sum(len(group) for group in groups) < len(shapes)
    # positions in each group -> the ways (2 are enough) in which the names so far lead there
    reached: dict[tuple[int, ...], list[tuple[int, ...]]] = {(0,) * len(groups): [()]}
    for shape in shapes.values():
        following: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for positions, ways in reached.items():
            steps = [(-1, positions)] if skips else []
            for number, (group, at) in enumerate(zip(groups, positions, strict=True)):
                if at < len(group) and tuple(group[at]) == tuple(shape):
                    steps.append((number, (*positions[:number], at + 1, *positions[number + 1 :])))
            for number, after in steps:
                known = following.setdefault(after, [])
                known += [(*way, number) for way in ways]
                del known[2:]
        reached = following
    found = reached.get(tuple(len(group) for group in groups), [])
    if len(found) != 1:
        return None
    members: list[list[str]] = [[] for _ in groups]
    for name, number in zip(shapes, found[0], strict=True):
        if number >= 0:
            members[number].append(name)
    return members
