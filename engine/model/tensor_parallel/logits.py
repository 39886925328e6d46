"""Logits that stay cut over the vocabulary, and the cross entropy that needs no others.

A `CutLogits` looks like the whole tensor (its shape is the global one) and holds this rank's columns. Casts, scalings,
and views and indices that leave the vocabulary alone keep it cut, `torch.nn.functional.cross_entropy` is computed on
the parts, and whatever else is asked of it gets the joined tensor: exact, at the price of the memory.
Whatever joins is a collective of the tp ranks.

The loss: every rank has the maximum m, the sum of exponentials and the target's logit of its columns; one all-gather
of these three numbers a token gives log-sum-exp and loss on all ranks, and the gradient is local
(Megatron-LM, https://arxiv.org/abs/1909.08053, section 3, has the idea).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function

from engine.collectives.activations import joined
from engine.collectives.shards import ShardGroup
from engine.config.messages import EngineError
from engine.cut import Cut
from engine.torch_compat import tree_map

log = logging.getLogger("engine")

_OF_THE_PART = """
    dtype device layout requires_grad requires_grad_ grad_fn is_leaf register_hook retain_grad dim ndim ndimension
    is_floating_point is_complex is_cuda is_cpu is_meta is_sparse is_nested is_quantized itemsize element_size
    is_contiguous get_device names is_inference
""".split()  # noqa: SIM905
"""Answered by this rank's columns as by the whole."""
_ELEMENTWISE = """
    float double half bfloat16 to type contiguous clone detach cpu cuda tanh neg __neg__ mul __mul__ __rmul__ multiply
    div divide true_divide __truediv__ add __add__ __radd__ sub __sub__
""".split()  # noqa: SIM905
_VIEWS = "view reshape flatten unflatten squeeze unsqueeze".split()  # noqa: SIM905


class CutLogits(Tensor):
    """Global (..., vocabulary), of which ``part`` (..., local vocabulary) is this rank's."""

    part: Tensor
    cut: Cut
    group: ShardGroup
    whole: Tensor | None

    @classmethod
    def of(cls, part: Tensor, cut: Cut, group: ShardGroup) -> Self:
        logits = part.as_subclass(cls)
        logits.part, logits.cut, logits.group, logits.whole = part, cut, group, None
        return logits

    def join(self) -> Tensor:
        """The whole tensor, plain, on every tp rank. All of them call it."""
        if self.whole is None:
            self.whole = joined(self.part, self.cut, self.group, "the logits")
        return self.whole

    @property
    def global_shape(self) -> torch.Size:
        return torch.Size((*self.part.shape[:-1], self.cut.global_shape[0]))

    def like(self, part: Tensor) -> CutLogits:
        return CutLogits.of(part, self.cut, self.group)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CutLogits(shape={tuple(self.global_shape)}, columns {self.cut.rank + 1} of {self.cut.size})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        logits = args[0] if args and isinstance(args[0], cls) else kwargs.get("input")
        if isinstance(logits, cls):
            handled = _answer(logits, func, name, args, kwargs)
            if handled is not NotImplemented:
                return handled
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise EngineError(
                f"{name} would change logits in place, and they are cut over the vocabulary, a part on each tp rank; "
                "write it without changing them in place"
            )
        _note(name)
        args, kwargs = tree_map(lambda leaf: leaf.join() if isinstance(leaf, cls) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def _answer(
    logits: CutLogits, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What can be said without joining; else NotImplemented."""
    shape, part = logits.global_shape, logits.part
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor) and value is not logits]
    if name == "shape":
        return shape
    if name == "size":
        return shape[args[1] if len(args) > 1 else kwargs["dim"]] if len(args) > 1 or kwargs else shape
    if name in ("numel", "nelement"):
        return shape.numel()
    if name == "__len__":
        return shape[0]
    if name == "__repr__":
        return repr(logits)
    if name in _OF_THE_PART:
        return func(part, *args[1:], **kwargs)
    if name in _ELEMENTWISE and all(other.ndim == 0 for other in others):
        return logits.like(func(part, *args[1:], **kwargs))
    if name in _VIEWS and not any(isinstance(value, torch.dtype) for value in args):
        target = func(torch.empty(shape, device="meta"), *args[1:], **kwargs).shape
        if target and target[-1] == shape[-1]:
            return logits.like(part.reshape(*target[:-1], part.shape[-1]))
    if name == "__getitem__" and _leaves_last(args[1], len(shape)):
        return logits.like(part[args[1]])
    if name == "cross_entropy":
        return _cross_entropy(*args, **kwargs)  # may be NotImplemented, too
    return NotImplemented


def _leaves_last(index: Any, num_dimensions: int) -> bool:
    """Whether ``tensor[index]`` keeps the last dimension whole and last."""
    items = list(index) if isinstance(index, tuple) else [index]
    at = next((position for position, item in enumerate(items) if item is Ellipsis), None)
    last = next((item for item in reversed(items) if item is not None), None)
    if at is not None:
        reaches_last = any(item is not None for item in items[at + 1 :])
    else:
        consumed = [_num_consumed(item) for item in items]
        reaches_last = sum(consumed) == num_dimensions
    return not reaches_last or (isinstance(last, slice) and last == slice(None))


def _num_consumed(item: Any) -> int:
    """How many dimensions one entry of an index stands for."""
    if item is None:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


_noted: set[str] = set()


def _note(name: str) -> None:
    if name not in _noted:
        _noted.add(name)
        log.info("logits that are cut over the vocabulary are joined on every tp rank for %s", name)


def _cross_entropy(
    input: CutLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of classes last, from class indices; else NotImplemented."""
    is_plain = weight is None and size_average is None and reduce is None and isinstance(target, Tensor)
    if not is_plain or input.part.ndim > 2 or target.ndim != input.part.ndim - 1 or target.is_floating_point():
        return NotImplemented
    logits = input.part.reshape(-1, input.part.shape[-1])
    if torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()  # as autocast does with the whole
    losses = _CrossEntropy.apply(
        logits, target.reshape(-1), input.cut, input.group, int(ignore_index), float(label_smoothing)
    )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


class _CrossEntropy(Function):
    """Of local logits (tokens, local vocabulary), the loss of each token, whole; 0 where the target is ignored."""

    @staticmethod
    def forward(
        context: Any, logits: Tensor, target: Tensor, cut: Cut, group: ShardGroup, ignored: int, smoothing: float
    ) -> Tensor:
        (vocabulary,), ((_, first, width),) = cut.global_shape, tuple(cut.ranges())
        counts = target != ignored
        _check_targets(target, counts, vocabulary)
        values = logits.float()
        maximum = values.amax(-1)
        shifted = values - maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(-1)
        exponentials = shifted.exp_().sum(-1)
        local = target - first
        is_here = counts & (local >= 0) & (local < width)
        local = local.masked_fill(~is_here, 0)
        chosen = values.gather(1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
        rows = [maximum, exponentials, chosen, *([values.sum(-1)] if smoothing else [])]
        held = torch.empty(group.size, len(rows), target.numel(), dtype=torch.float32, device=logits.device)
        held[group.rank] = torch.stack(rows)
        group.all_gather(held.view(-1), group.even_bounds(held.numel()), "summing the vocabulary's exponentials").wait()
        maxima, sums, chosens, *totals = held.unbind(1)
        top = maxima.amax(0)
        log_sum = top + (sums * (maxima - top).exp()).sum(0).log()
        losses = log_sum - chosens.sum(0)
        if smoothing:
            losses = (1.0 - smoothing) * losses + smoothing * (log_sum - totals[0].sum(0) / vocabulary)
        context.save_for_backward(logits, local, is_here, counts, log_sum)
        context.smoothing, context.vocabulary = smoothing, vocabulary
        return losses.masked_fill(~counts, 0.0).to(logits.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        logits, local, is_here, counts, log_sum = context.saved_tensors
        slope = (logits.float() - log_sum.unsqueeze(-1)).exp_()
        here = is_here.to(slope.dtype) * (1.0 - context.smoothing)
        slope.scatter_add_(1, local.unsqueeze(-1), -here.unsqueeze(-1))
        if context.smoothing:
            slope -= context.smoothing / context.vocabulary
        slope *= (gradient.float() * counts).unsqueeze(-1)
        return slope.to(logits.dtype), None, None, None, None, None


def _check_targets(target: Tensor, counts: Tensor, vocabulary: int) -> None:
    """As torch does it: an error on the CPU; a wrong index on an accelerator is an assertion of the device there."""
    wrong = counts & ((target < 0) | (target >= vocabulary))
    if target.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
