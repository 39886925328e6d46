"""DeepSpeed's ``deepspeed.pipe``: a model as a list of layers, and the shape of its mesh."""

from __future__ import annotations

from engine.contracts import EngineError, PipelineError
from engine.model.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipelineError",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]


class ProcessTopology:
    """``axes`` and their sizes, outermost first. Only the size of "pipe" is read here; the rest follows from the
    config and the number of ranks."""

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        if len(axes) != len(dims):
            raise EngineError(f"ProcessTopology: {len(axes)} axes and {len(dims)} dims")
        self.axes, self.dims = list(axes), list(dims)

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 where there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def world_size(self) -> int:
        size = 1
        for dim in self.dims:
            size *= dim
        return size


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline outside, data parallel inside."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])
