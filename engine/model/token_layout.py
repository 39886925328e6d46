"""Where tokens are in the arguments of a block, and the same arguments with some of the tokens only.

A tensor follows the tokens along one dimension (positions, rotary tables, padding masks), along its last two (attention
masks, biases), or not at all. What a tensor is can be ambiguous by its shape; then there are several candidates, likely
ones first, and the proof (token_probe.py) decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

Order = Literal["batch_seq_dim", "seq_batch_dim"]
Path = tuple[int | str, ...]
"""Of a leaf in nested arguments: the parameter's name, then keys and positions inside it."""

MAX_TRIALS, MAX_READINGS = 64, 4096
_ALONG = ("position", "rotary", "freqs", "cos", "sin", "padding")
_FIXED = ("encoder", "cross", "memory")


@dataclass(frozen=True)
class Tokens:
    """A hidden state's samples and tokens, and which of its first two dimensions is which."""

    num_samples: int
    num_tokens: int
    order: Order = "batch_seq_dim"

    @staticmethod
    def of(hidden: Tensor, order: Order) -> Tokens:
        first, second = hidden.shape[:2]
        return Tokens(first, second, order) if order == "batch_seq_dim" else Tokens(second, first, order)

    @property
    def batch_dim(self) -> int:
        return 0 if self.order == "batch_seq_dim" else 1


@dataclass(frozen=True)
class Follow:
    """``dim``: that of the tokens; ``pairs``: the last two dimensions; neither: the tensor stays as it is.

    ``batch_dim``: None for a tensor that all samples share, which can follow only tokens that they share too.
    """

    dim: int | None = None
    pairs: bool = False
    batch_dim: int | None = None

    @property
    def shares_tokens(self) -> bool:
        return (self.pairs or self.dim is not None) and self.batch_dim is None


FIXED = Follow()


def candidates(path: Path, tensor: Tensor, tokens: Tokens, mask_name: str | None) -> list[Follow]:
    """What ``tensor`` may be, the likeliest first."""
    shape, length = tuple(tensor.shape), tokens.num_tokens
    found: list[Follow] = []
    samples = {1, tokens.num_samples}
    if tensor.ndim >= 2 and shape[-2:] == (length, length):
        if tensor.ndim == 2:
            found.append(Follow(pairs=True))
        elif shape[0] % tokens.num_samples == 0 or shape[0] == 1:
            found.append(Follow(pairs=True, batch_dim=0))
    along: list[Follow] = []
    for dim in (at for at, size in enumerate(shape) if size == length):
        if dim == 0:
            has_batch = tokens.batch_dim == 1 and tensor.ndim > 1 and shape[1] in samples
            along.append(Follow(0, batch_dim=1 if has_batch else None))
        elif shape[0] in samples or (tensor.ndim > 2 and shape[0] % tokens.num_samples == 0):
            along.append(Follow(dim, batch_dim=0))
    along.sort(key=lambda follow: (follow.batch_dim is None, follow.dim))
    name = ".".join(map(str, path)).lower()
    is_mask = path[0] == mask_name or "bias" in name or ("mask" in name and "padding" not in name)
    found = [*along, *found] if any(word in name for word in _ALONG) and not is_mask else [*found, *along]
    return [FIXED, *found] if any(word in name for word in _FIXED) else [*found, FIXED]


def layouts(leaves: Mapping[Path, Tensor], tokens: Tokens, mask_name: str | None) -> list[dict[Path, Follow]]:
    """Every reading of the arguments, the likeliest first; at most `MAX_TRIALS`."""
    choices = {path: candidates(path, tensor, tokens, mask_name) for path, tensor in leaves.items()}
    while math.prod(len(each) for each in choices.values()) > MAX_READINGS:
        longest = max(choices, key=lambda path: len(choices[path]))
        choices[longest].pop()
    ranks = sorted(product(*(range(len(each)) for each in choices.values())), key=sum)
    return [
        {path: each[rank] for (path, each), rank in zip(choices.items(), chosen, strict=True)}
        for chosen in ranks[:MAX_TRIALS]
    ]


def signature(leaves: Mapping[Path, Tensor], tokens: Tokens) -> tuple[Any, ...]:
    """What tells kinds of calls apart: which tensors there are and which of their dimensions tokens could have."""

    def pattern(tensor: Tensor) -> str:
        return "".join("t" if size == tokens.num_tokens else "1" if size == 1 else "-" for size in tensor.shape)

    return tuple((path, pattern(tensor)) for path, tensor in leaves.items())


def map_tensors(function: Callable[[Path, Tensor], Tensor], tree: Any, path: Path = ()) -> Any:
    """``tree`` (nested tuples, lists, dicts) with every tensor replaced by ``function(path, tensor)``."""
    if isinstance(tree, Tensor):
        return function(path, tree)
    if isinstance(tree, tuple | list) and any(not _is_plain(item) for item in tree):
        items = [map_tensors(function, item, (*path, at)) for at, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if type(tree) is dict:
        return {key: map_tensors(function, item, (*path, str(key))) for key, item in tree.items()}
    return tree


def map_arguments(
    function: Callable[[Path, Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    hidden: int | str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`map_tensors` over a call's arguments but the ``hidden`` one. ``names``: of the positional parameters."""
    paths: list[Path] = [(names[at] if at < len(names) else at,) for at in range(len(args))]
    return (
        tuple(arg if at == hidden else map_tensors(function, arg, paths[at]) for at, arg in enumerate(args)),
        {key: arg if key == hidden else map_tensors(function, arg, (key,)) for key, arg in kwargs.items()},
    )


def _is_plain(item: Any) -> bool:
    return item is None or isinstance(item, bool | int | float | str)


def keep(tensor: Tensor, follow: Follow, positions: Tensor) -> Tensor:
    """``tensor`` at ``positions``, int64 (samples, kept). One that has a batch of 1 gets one row per sample."""
    if follow.shares_tokens:
        shared = positions[0]
        rows = tensor.index_select(-2 if follow.pairs else follow.dim or 0, shared)
        return rows.index_select(-1, shared) if follow.pairs else rows
    if follow.pairs:
        return _keep_along(_keep_along(tensor, tensor.ndim - 2, positions), tensor.ndim - 1, positions)
    if follow.dim is None:
        return tensor
    if follow.batch_dim == 1:
        return _keep_along(tensor.transpose(0, 1), 1, positions).transpose(0, 1)
    return _keep_along(tensor, follow.dim, positions)


def _keep_along(tensor: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Of a tensor whose first dimension is the batch, or a multiple of it (heads within samples), or 1."""
    num_samples, num_kept = positions.shape
    if tensor.shape[0] == 1 != num_samples:
        tensor = tensor.expand(num_samples, *tensor.shape[1:])
    positions = positions.repeat_interleave(tensor.shape[0] // num_samples, dim=0)
    shape = [1] * tensor.ndim
    shape[0], shape[dim] = positions.shape
    size = list(tensor.shape)
    size[dim] = num_kept
    return tensor.gather(dim, positions.view(shape).expand(size))


def take_rows(hidden: Tensor, positions: Tensor, tokens: Tokens) -> Tensor:
    """The hidden state of the kept tokens: (samples, kept, ...), or (kept, samples, ...) in the other order."""
    rows = hidden.reshape(-1, *hidden.shape[2:]).index_select(0, _row_numbers(positions, tokens))
    shape = positions.shape if tokens.batch_dim == 0 else positions.shape[::-1]
    return rows.view(*shape, *hidden.shape[2:])


def put_rows(hidden: Tensor, rows: Tensor, positions: Tensor, tokens: Tokens) -> Tensor:
    """``hidden`` with ``rows`` in the places that `take_rows` took them from; the rest of it passes by untouched."""
    flat = hidden.to(rows.dtype).reshape(-1, *hidden.shape[2:])
    flat = flat.index_copy(0, _row_numbers(positions, tokens), rows.reshape(-1, *hidden.shape[2:]))
    return flat.view(hidden.shape)


def _row_numbers(positions: Tensor, tokens: Tokens) -> Tensor:
    samples = torch.arange(tokens.num_samples, device=positions.device).unsqueeze(1)
    if tokens.batch_dim == 0:
        return (positions + samples * tokens.num_tokens).flatten()
    return (positions * tokens.num_samples + samples).t().flatten()


def cut(tensor: Tensor, follow: Follow, tokens: Tokens, num_samples: int, num_tokens: int) -> Tensor:
    """The first samples and tokens of ``tensor``."""
    if follow.pairs:
        tensor = tensor[..., :num_tokens, :num_tokens]
    elif follow.dim is not None:
        tensor = tensor.narrow(follow.dim, 0, num_tokens)
    batch_dim = 0 if follow == FIXED else follow.batch_dim
    if batch_dim is None or tensor.ndim == 0:
        return tensor
    per_sample, rest = divmod(tensor.shape[batch_dim], tokens.num_samples)
    if rest or not per_sample or (follow == FIXED and per_sample != 1):
        return tensor
    return tensor.narrow(batch_dim, 0, per_sample * num_samples)
