"""Which modules hold one matrix that can be cut, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Matrix:
    """A layer ``x -> x W (+ b)``. Sizes are global. ``transposed``: the weight is stored as (inputs, outputs)."""

    num_inputs: int
    num_outputs: int
    transposed: bool = False


def matrix_of(module: nn.Module) -> Matrix | None:
    """The matrix of a linear layer, also of transformers' ``Conv1D``; None for any other module."""
    if isinstance(module, nn.Linear):
        return Matrix(module.in_features, module.out_features)
    weight, num_outputs = getattr(module, "weight", None), getattr(module, "nf", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and isinstance(num_outputs, int):
        return Matrix(weight.shape[0], num_outputs, transposed=True)
    return None


def describe_size(module: nn.Module) -> str:
    """``Linear 64 -> 192``, ``Embedding 256 x 64``, or the class alone."""
    matrix, kind = matrix_of(module), type(module).__name__
    if matrix is not None:
        return f"{kind} {matrix.num_inputs} -> {matrix.num_outputs}"
    if isinstance(module, nn.Embedding):
        return f"{kind} {module.num_embeddings} x {module.embedding_dim}"
    return kind
