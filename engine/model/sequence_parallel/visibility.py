"""Which tokens see which, told for whole sequences and asked for parts of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.sequence_parallel.block_attention import Mask


@dataclass(frozen=True)
class Visibility:
    """A query sees a key where every part that is given allows it.

    ``is_causal``: not those behind it. ``window``: only the last so many, itself included. ``documents`` (B, S), for
    each token the document it belongs to, -1 - document where it is padding, which nothing sees: only tokens of the
    same one. ``mask``: bool, or added to the scores, broadcast to (B, heads, rows, S), its columns in the order of the
    whole sequence and its rows one, or one for each query of this rank.
    """

    is_causal: bool = False
    window: int | None = None
    documents: Tensor | None = None
    mask: Tensor | None = None

    @property
    def is_simple(self) -> bool:
        """Whether all or the lower triangle is all there is to say."""
        return self.window is None and self.documents is None and self.mask is None

    def of(self, queries: Tensor, keys: Tensor) -> Mask:
        """For the queries and keys at these places of the whole sequence, (Q,) and (K,); the rows of ``mask``, where it
        has many, are those of ``queries``."""
        if self.is_simple and not self.is_causal:
            return None
        allowed: Tensor | None = None
        distance = queries[:, None] - keys[None, :]
        if self.is_causal:
            allowed = distance >= 0
        if self.window is not None:
            near = distance < self.window
            allowed = near if allowed is None else allowed & near
        if allowed is not None:
            allowed = allowed[None, None]
        if self.documents is not None:
            of_keys = self.documents[:, keys][:, None, None, :]
            of_queries = self.documents[:, queries]
            of_queries = torch.where(of_queries < 0, -1 - of_queries, of_queries)[:, None, :, None]
            same = of_keys == of_queries
            allowed = same if allowed is None else allowed & same
        if self.mask is None:
            return allowed
        given = self.mask[..., keys]
        if allowed is None:
            return given
        if given.dtype == torch.bool:
            return given & allowed
        return given.masked_fill(~allowed, -torch.inf)
