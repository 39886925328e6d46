"""The loss of whole sequences from the losses of their slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError, LossSum
from engine.data.batch import scalar_loss

IGNORED = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out of its mean."""


def share_of(labels: Tensor | None, own: Tensor | None, num_slices: int) -> Tensor | float:
    """What part of the mean over whole sequences falls on a slice.

    ``labels`` are whole, ``own`` those of the slice. Without integer labels every slice has an equal part.
    """
    if labels is None or own is None or labels.is_floating_point():
        return 1.0 / num_slices
    return (own != IGNORED).sum() / (labels != IGNORED).sum()


def whole_loss(output: Any, share: Tensor | float, groups: Sequence[ShardGroup]) -> Any:
    """``output`` with its loss, a mean over a slice of which it is ``share``, replaced by that of whole sequences."""
    loss = scalar_loss(output)
    if loss is None or isinstance(loss, LossSum):
        return output
    if isinstance(share, Tensor):
        loss = torch.where(share == 0, torch.zeros_like(loss), loss)  # the mean of a slice without labels is 0 / 0
    return with_loss(output, _SumOverSlices.apply(loss * share, groups))


def with_loss(output: Any, loss: Tensor) -> Any:
    """``output`` with ``loss`` where `engine.data.batch.scalar_loss` found it."""
    if isinstance(output, Tensor):
        return loss.reshape(output.shape)
    if isinstance(output, Mapping) and "loss" in output:
        if hasattr(output, "to_tuple"):  # Hugging Face's outputs keep an attribute beside the item
            output["loss"] = loss  # type: ignore[index]
            return output
        return {**output, "loss": loss}
    if getattr(output, "loss", None) is not None:
        if hasattr(output, "_replace"):
            return output._replace(loss=loss)
        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            return dataclasses.replace(output, loss=loss)
        output.loss = loss
        return output
    if isinstance(output, tuple | list):
        return type(output)((loss, *output[1:]))
    raise EngineError(f"a loss in a {type(output).__name__} cannot be replaced; return a tensor, a dict or a tuple")


class _SumOverSlices(torch.autograd.Function):
    """The same value on every rank; its gradient belongs to what this rank put in."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Sequence[ShardGroup]) -> Tensor:
        total = value.detach().clone().reshape(1)
        for group in groups:
            group.all_reduce(total, "summing the losses of slices").wait()
        return total.reshape(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
