"""Where a forward is between a layer cut by outputs and the layer cut by inputs that closes it.

In between every tp rank has activations of its own (its heads, its part of a hidden width). Two things hold there:

* layers that read one whole activation (query, key and value; gate and up) share one all-reduce of its gradient;
* dropout draws from a stream of this rank's own. Outside, where activations are equal, the masks are equal too. The
  stream begins at a number drawn from the common one, so a block that is computed again draws what it drew before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.collectives.activations import copied
from engine.collectives.shards import ShardGroup
from engine.config.messages import EngineError
from engine.cut import Cut
from engine.device import generator_states, restore_generators, seed_generators
from engine.random import stream_seed

_LARGEST = 1 << 62


class Region:
    """The state of one model's forward on one rank. ``group``: the tp ranks."""

    def __init__(self, group: ShardGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._inside = False
        self._outside_states: list[Tensor] | None = None
        self._entered: tuple[Tensor, Tensor] | None = None
        self._block_is_apart = False
        self.lengths: list[int] = []
        """Of the sequence that runs through the blocks, whole, where they see shards of it."""
        self.sequence: Cut | None = None
        """How activations lie along the sequence in the block that runs now; None: they are whole."""
        self.joined: Tensor | None = None
        """In such a block: what the last norm has joined."""

    def enter(self, x: Tensor, what: str, training: bool) -> Tensor:
        """``x``, whole, as a layer that is cut by outputs reads it."""
        if self.sequence is not None:
            if self.joined is not x:
                raise EngineError(
                    f'{what} reads what is no output of a norm that tensor_parallel.plan calls "sequence": its shards '
                    "of the sequence cannot be joined there; name the norm before it too, or none"
                )
            return x
        if not self._inside:
            self._inside = True
            if training:
                self._draw_apart()
        if self._entered is None or self._entered[0] is not x or not torch.is_grad_enabled():
            self._entered = x, copied(x, self.group, what)
        return self._entered[1]

    def leave(self) -> None:
        """Activations are about to be made whole again."""
        self._inside, self._entered = False, None
        if self._outside_states is not None and not self._block_is_apart:
            restore_generators(self.device, self._outside_states)
            self._outside_states = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A block or a model: it is left outside whatever ends it (an error, or a recomputation that has enough)."""
        self.leave()
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def along_sequence(self, cut: Cut, training: bool) -> Iterator[None]:
        """A block whose activations are cut along the sequence, except between a norm and the layer that ends what
        it feeds: all its dropout is this rank's own."""
        self.sequence = cut
        if training:
            self._draw_apart()
            self._block_is_apart = True
        try:
            yield
        finally:
            self.sequence, self.joined, self._block_is_apart = None, None, False
            self.leave()

    def _draw_apart(self) -> None:
        number = int(torch.randint(_LARGEST, (), dtype=torch.int64).item())
        self._outside_states = generator_states(self.device)
        seed_generators(self.device, stream_seed(number, "tp", self.group.rank))
