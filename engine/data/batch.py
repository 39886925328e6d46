"""What a batch is: how it is handed to a model, moved and cast, what loss comes back, how many tokens it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.contracts import EngineError, LossSum
from engine.torch_compat import tree_leaves, tree_map_tensors


def call_with_batch(model: Callable[..., Any], batch: Any) -> Any:
    """dict -> ``model(**batch)``; tuple or list -> ``model(*batch)``; anything else -> ``model(batch)``."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def loss_with_batch(
    model: Callable[..., Any], batch: Any, loss_fn: Callable[..., Any] | None, device: torch.device
) -> Tensor | LossSum:
    """The loss of one micro-batch. With ``loss_fn`` the batch is ``(inputs, targets)``; targets go to ``device``.

    Raises EngineError when neither the model nor ``loss_fn`` gives a scalar.
    """
    if loss_fn is None:
        return loss_of(call_with_batch(model, batch))
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise EngineError(f"with a loss_fn a batch is (inputs, targets); the loader gave {describe(batch)}")
    inputs, targets = batch
    return loss_of(loss_fn(call_with_batch(model, inputs), place(targets, device, None)))


def loss_of(output: Any) -> Tensor | LossSum:
    """The loss in what a model returns: a scalar, ``.loss``, ``["loss"]``, or item 0."""
    loss = scalar_loss(output)
    if loss is not None:
        return loss
    raise EngineError(
        f"the model returned {describe(output)}, which holds no scalar loss: return a 0-dim "
        "loss (or .loss, ['loss'], item 0), or pass loss_fn to initialize()"
    )


def scalar_loss(output: Any) -> Tensor | LossSum | None:
    """As `loss_of`; None where there is none."""
    candidate = output
    if isinstance(output, LossSum):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        candidate = output["loss"]
    elif getattr(output, "loss", None) is not None:
        candidate = output.loss
    elif isinstance(output, tuple | list) and output:
        candidate = output[0]
    return candidate.reshape(()) if isinstance(candidate, Tensor) and candidate.numel() == 1 else None


def place(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The batch on ``device``, its floating tensors in ``dtype`` (None: as they are); integers and others untouched."""

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.device == device and tensor.dtype == wanted:
            return tensor
        return tensor.to(device, wanted, non_blocking=True)

    return tree_map_tensors(move, batch)


def count_tokens(batch: Any) -> int:
    """Tokens (local) of a batch: elements of its first integer tensor of two dimensions, else of more; 0 if none."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim >= 2]
    integers = [leaf for leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex()]
    return next((leaf.numel() for leaf in sorted(integers, key=lambda leaf: leaf.ndim > 2)), 0)


def describe(value: Any) -> str:
    """A batch or an output in a few words, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} items"
    return f"a {type(value).__name__}"
