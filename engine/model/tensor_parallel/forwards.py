"""What split modules do in their forward: each gets one of its own, on the instance, so that hooks stay around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.collectives.activations import copied, joined, parted, summed, summed_to_parts
from engine.cut import Cut
from engine.model.tensor_parallel.logits import CutLogits
from engine.model.tensor_parallel.region import Region
from engine.model.tensor_parallel.sequence import DIMENSION, shard_sequence
from engine.model.tensor_parallel.split import Split, TensorPlan

Forward = Callable[..., Any]


def split_forwards(
    model: nn.Module, plan: TensorPlan, cuts: Mapping[str, Cut], blocks: Sequence[nn.Module], region: Region
) -> None:
    """Replace the forwards of the modules that ``plan`` splits. ``cuts``: of their weights, by module name."""
    makers = {"column": _column, "row": _row, "vocabulary": _vocabulary, "head": _head}
    for name, split in plan.splits.items():
        module = model.get_submodule(name)
        module.forward = makers[split.style](module, name, split, cuts[name], region)
    for name in plan.summed:
        module = model.get_submodule(name)
        module.forward = _with_summed_gradients(module, name, region)
    if plan.sequence:
        shard_sequence(model, blocks, plan, region, _with_summed_gradients)
    for module in dict.fromkeys((*blocks, model)):
        module.forward = _around(module.forward, region)


def _around(inner: Forward, region: Region) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with region.around():
            return inner(*args, **kwargs)

    return forward


def _column(module: nn.Module, name: str, split: Split, cut: Cut, region: Region) -> Forward:
    """Own outputs of a whole input."""
    compute = _linear(module, split, with_bias=True)
    if not split.gather_output:
        return lambda x: compute(region.enter(x, name, module.training))
    return lambda x: joined(compute(copied(x, region.group, name)), cut, region.group, name)


def _row(module: nn.Module, name: str, split: Split, cut: Cut, region: Region) -> Forward:
    """The whole output from own inputs; the bias, which every rank has, is added to the sum, once."""
    compute = _linear(module, split, with_bias=False)

    def forward(x: Tensor) -> Tensor:
        region.leave()
        if split.split_input:
            x = parted(x, cut, region.group, name)
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        if region.sequence is None:
            y = summed(compute(x), region.group, name)
        else:
            y = summed_to_parts(compute(x), region.sequence, region.group, name, DIMENSION)
            bias = None if bias is None else copied(bias, region.group, f"{name}.bias")
        return y if bias is None else y + bias.to(y.dtype)

    return forward


def _linear(module: nn.Module, split: Split, with_bias: bool) -> Callable[[Tensor], Tensor]:
    if with_bias and not split.transposed:
        return module.forward  # a subclass may do more
    if not split.transposed:
        return lambda x: F.linear(x, module.weight)  # type: ignore[arg-type]

    def conv1d(x: Tensor) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]
        rows = x.reshape(-1, x.shape[-1])
        y = torch.addmm(module.bias, rows, weight) if with_bias else rows @ weight  # type: ignore[arg-type]
        return y.view(*x.shape[:-1], weight.shape[1])

    return conv1d


def _vocabulary(module: nn.Module, name: str, split: Split, cut: Cut, region: Region) -> Forward:
    """Rows of other ranks are zeros here; the sum has every token's row."""
    inner = module.forward
    ((_, first, width),) = tuple(cut.ranges())
    padding: int | None = module.padding_idx  # type: ignore[assignment]
    own_padding = padding - first if padding is not None and first <= padding < first + width else None

    def forward(tokens: Tensor) -> Tensor:
        module.padding_idx = own_padding  # type: ignore[assignment]  # not earlier: initialisations read the whole one
        local = tokens - first
        elsewhere = (local < 0) | (local >= width)
        rows = inner(local.masked_fill(elsewhere, 0))
        return summed(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), region.group, name)

    return forward


def _head(module: nn.Module, name: str, split: Split, cut: Cut, region: Region) -> Forward:
    compute = _linear(module, split, with_bias=True)
    vocabulary = Cut((cut.global_shape[cut.dimension],), 0, cut.segments, cut.size, cut.rank)

    def forward(x: Tensor) -> Tensor:
        logits = compute(copied(x, region.group, name))
        if split.gather_output:
            return joined(logits, vocabulary, region.group, name)
        return CutLogits.of(logits, vocabulary, region.group)

    return forward


def _with_summed_gradients(module: nn.Module, name: str, region: Region) -> Forward:
    """A module kept whole that sees only this rank's part of an activation (a norm over single heads)."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = list(module.named_parameters(recurse=False))
        for key, parameter in own:
            delattr(module, key)
            setattr(module, key, copied(parameter, region.group, f"{name}.{key}"))
        try:
            return inner(*args, **kwargs)
        finally:
            for key, parameter in own:
                delattr(module, key)
                setattr(module, key, parameter)

    return forward
