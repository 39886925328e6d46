"""What the plan may know of a model, without torch. Filled from a model on the meta device by engine/model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.tensor_parallel import SplitSizes


@dataclass(frozen=True)
class ModelFacts:
    """Counts are of elements, tied parameters once. ``blocks`` are the names of the repeated blocks, in order;
    ``ties`` the groups of parameter names that share one tensor. None means not known."""

    num_parameters: int
    num_trainable_parameters: int
    blocks: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    num_block_parameters: int | None = None
    """Elements in the largest block."""
    num_heads: int | None = None
    split_sizes: SplitSizes | None = None
