"""Tensor parallelism: a model's matrices cut over the tp axis of the mesh.

First file to read: split.py (the record of a plan), then apply.py.
"""

from engine.model.tensor_parallel.apply import apply
from engine.model.tensor_parallel.split import Split, TensorPlan

__all__ = ["Split", "TensorPlan", "apply"]
