"""Cut the matrices of one module in place, as plain local tensors. What a plan is proved with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.mesh import Mesh
from engine.model.tensor_parallel.matrices import matrix_of
from engine.model.tensor_parallel.split import Split, TensorPlan


def part(whole: Tensor, dimension: int, segments: Sequence[int], size: int, rank: int) -> Tensor:
    pieces = [segment.tensor_split(size, dimension)[rank] for segment in whole.split(list(segments), dimension)]
    return torch.cat(pieces, dimension)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


def split_dimension(split: Split, key: str, weight: Tensor) -> int | None:
    if split.style in ("vocabulary",):
        return 0
    if split.style in ("column", "head"):
        return 0 if key == "bias" or not split.transposed else 1
    if key == "bias":
        return None
    return 0 if split.transposed else 1


def local_part(name: str, tensor: Tensor, plan: TensorPlan, size: int, rank: int) -> Tensor:
    module, _, key = name.rpartition(".")
    split = plan.splits.get(module)
    dimension = split_dimension(split, key, tensor) if split is not None else None
    if split is None or dimension is None:
        return tensor
    return part(tensor, dimension, split.segments or (tensor.shape[dimension],), size, rank)


def cut_in_place(root: nn.Module, plan: TensorPlan, mesh: Mesh) -> None:
    size, rank, group = mesh.degrees["tp"], mesh.coordinates["tp"], mesh.group("tp")
    for name, split in plan.splits.items():
        module = root.get_submodule(name)
        starts = 0
        matrix = matrix_of(module)
        whole = matrix.num_outputs if matrix else 0
        if isinstance(module, nn.Embedding):
            sizes = [t.shape[0] for t in module.weight.tensor_split(size)]
            starts = sum(sizes[:rank])
        for key, parameter in list(module.named_parameters(recurse=False)):
            local = local_part(f"{name}.{key}", parameter.data, plan, size, rank).clone()
            setattr(module, key, nn.Parameter(local))
        if hasattr(module, "nf") and split.style in ("column", "head"):
            module.nf = module.weight.shape[1]
        module.forward = _forward(module, split, group, size, rank, starts, whole)  # type: ignore[method-assign]
    for path, value in plan.attributes.items():
        owner, _, key = path.rpartition(".")
        setattr(root.get_submodule(owner), key, value)


def _forward(module: nn.Module, split: Split, group: Any, size: int, rank: int, start: int, whole: int) -> Any:
    plain = type(module).forward

    def column(x: Tensor) -> Tensor:
        y = plain(module, _Enter.apply(x, group))
        if not split.gather_output:
            return y
        sizes = list(split.segments or (whole,))
        full = y.new_zeros((*y.shape[:-1], whole))
        index = part(torch.arange(whole), 0, sizes, size, rank)
        return _Leave.apply(full.index_copy(-1, index, y), group)

    def row(x: Tensor) -> Tensor:
        if split.split_input:
            x = part(_Enter.apply(x, group), x.dim() - 1, (x.shape[-1],), size, rank)
        bias = module.bias
        module.bias = None
        weight = module.weight if split.transposed else module.weight.t()
        y = _Leave.apply(x @ weight, group)
        module.bias = bias
        return y if bias is None else y + bias

    def vocabulary(ids: Tensor) -> Tensor:
        local = ids - start
        outside = (local < 0) | (local >= module.weight.shape[0])
        y = torch.nn.functional.embedding(local.masked_fill(outside, 0), module.weight)
        return _Leave.apply(y.masked_fill(outside[..., None], 0.0), group)

    return {"column": column, "head": column, "row": row, "vocabulary": vocabulary}[split.style]
