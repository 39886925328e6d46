"""The only place for private torch names, each with the reason and what would make it go. Right for torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested dicts, lists and tuples, Hugging Face outputs included.

    torch.utils._pytree is what FSDP2 and the pipeline use; `torch.utils.pytree` is to replace it.
    """
    return _pytree.tree_leaves(tree)


def tree_map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced by ``function(tensor)``."""
    return _pytree.tree_map_only(Tensor, function, tree)
