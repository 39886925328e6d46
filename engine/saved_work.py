"""What layer drop and token drop left out, and where in the run a forward stands.

They write into one `SavedWork`; the step reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where a run is: steps counted (skipped ones included), steps applied, training forward of the window, from 0; and
    where a pipeline cuts its micro-batch up: how many of the samples (local) are in front, and of how many parts this
    is one."""

    global_steps: int = 0
    applied_steps: int = 0
    micro_step: int = 0
    first_sample: int = 0
    num_parts: int = 1


@dataclass
class SavedWork:
    """What layers left out on this rank since the last `take`: layer drop and token drop write it down here.

    Only in training forwards, and once where a forward is computed again for its activations. ``place`` tells them
    where the run is; ``sources`` give scalars for the monitors, which `take` keeps in ``scalars`` for the report.
    """

    layers_skipped: int = 0
    layer_tokens: int = 0
    refusal: str | None = None
    """Why a layer cannot leave anything out, where that was found in a forward: the step ends the run with it."""
    place: Callable[[], Place] = Place
    passage: Hashable = None
    """Of a micro-batch through a pipeline stage: which one is computed, forward or backward. None without a pipeline,
    where a forward that is computed again must be recognised otherwise."""
    sources: list[Callable[[], Mapping[str, float]]] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)

    def skip_layer(self, num_tokens: int) -> None:
        """A layer that was not computed for a micro-batch (local) of ``num_tokens``."""
        self.layers_skipped += 1
        self.layer_tokens += num_tokens

    def drop_tokens(self, num_tokens: int) -> None:
        """Tokens that passed by one layer."""
        self.layer_tokens += num_tokens

    def take(self) -> tuple[int, int]:
        """(layers skipped, tokens times layers left out), and begin anew."""
        taken = self.layers_skipped, self.layer_tokens
        self.layers_skipped = self.layer_tokens = 0
        self.scalars = {name: value for source in self.sources for name, value in source().items()}
        return taken

    @contextlib.contextmanager
    def passing(self, passage: Hashable, place: Place) -> Iterator[None]:
        """Around a forward or a backward of a pipeline stage."""
        around, self.place, self.passage = self.place, lambda: place, passage
        try:
            yield
        finally:
            self.place, self.passage = around, None

    def count_for(self, num_stages: int) -> None:
        """What was left out in this window is this rank's part of the layers; the sums are taken over pipeline ranks
        as if each had seen all."""
        self.layers_skipped *= num_stages
        self.layer_tokens *= num_stages
