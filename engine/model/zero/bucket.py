"""A bucket of parameters: one flat buffer, its members, and their gradients on the way (buckets.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from engine.model.zero.shards import ParameterShard
from engine.parameters import ParameterInfo


@dataclass(eq=False)
class Member:
    """One parameter in a bucket, at ``[offset, offset + numel)``."""

    info: ParameterInfo
    parameter: nn.Parameter
    offset: int
    arrived: bool = False
    """In the backward that runs now."""
    collected: bool = False
    """In the round that runs now."""
    in_window: bool = False

    def __post_init__(self) -> None:
        self.stop = self.offset + self.info.numel

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.stop].view(self.info.shape)


@dataclass(eq=False)
class Bucket:
    """``values``: what forward reads, whole. ``master``: this rank's shard in master precision (a view of ``values``
    where the precision is the same). ``arrivals``: gradients that are not in ``collect`` yet, where those of the round
    gather; ``late``: those that came after the round had sent the bucket. ``result``: this rank's shard of the window's
    reduced gradients, None before the first reduction; ``flat_gradients``: the same as the optimizer gets them."""

    members: list[Member]
    bounds: list[int]
    rank: int
    values: Tensor
    master: Tensor
    gradient_dtype: torch.dtype
    home: Tensor | None = None
    collect: Tensor | None = None
    result: Tensor | None = None
    flat_gradients: Tensor | None = None
    arrivals: list[tuple[Member, Tensor]] = field(default_factory=list)
    late: list[tuple[Member, Tensor]] = field(default_factory=list)
    launched: bool = False
    num_waiting: int = 0
    shards: list[tuple[ParameterShard, int]] = field(default_factory=list)

    @cached_property
    def name(self) -> str:
        first, last = self.members[0].info.name, self.members[-1].info.name
        return first if first == last else f"{last} to {first}"

    @property
    def group(self) -> int:
        """The optimizer group of the first member (of all, in buckets that are made so)."""
        return self.members[0].info.group or 0

    @property
    def num_copies(self) -> int:
        """Tp ranks that hold the same; a bucket holds no others beside them."""
        return self.members[0].info.num_copies

    @property
    def own(self) -> slice:
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    # Hundreds of views a step are a measurable part of a small model's step; those of `home` never change.

    @cached_property
    def home_members(self) -> dict[int, Tensor]:
        """`home` cut into members, by registry index. Where whole gradients are kept."""
        assert self.home is not None
        return {member.info.index: member.view(self.home) for member in self.members}

    @cached_property
    def home_shards(self) -> list[Tensor]:
        """This rank's part of `home` cut into shards."""
        assert self.home is not None
        return self.cut(self.home if self.home.numel() == self.master.numel() else self.home[self.own])

    def cut(self, own: Tensor) -> list[Tensor]:
        """``own``, as large as this rank's shard of the bucket, in the shapes of the parameters' shards."""
        return [own[at : at + s.parameter.numel()].view(s.parameter.shape) for s, at in self.shards]

    def gradients(self) -> list[Tensor]:
        """The window's reduced gradients of the shards, in master precision: views of `flat_gradients`."""
        assert self.result is not None
        self.flat_gradients = self.result.to(self.master.dtype)
        if self.flat_gradients is not self.result:
            return self.cut(self.flat_gradients)
        in_home = (
            self.home is not None and self.result.untyped_storage().data_ptr() == self.home.untyped_storage().data_ptr()
        )
        return self.home_shards if in_home else self.cut(self.result)
