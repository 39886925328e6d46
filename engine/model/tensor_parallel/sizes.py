"""The numbers of a model that tp ranks must share, as far as its config or its attributes tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from engine.model.tensor_parallel.outside import find_vocabulary
from engine.plan.tensor_parallel import SplitSizes

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "nhead")
KEY_VALUE_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")


def split_sizes(model: nn.Module, blocks: Sequence[nn.Module]) -> SplitSizes:
    """From ``model.config`` where there is one, else from the integer attributes of the first block's modules.

    Heads are left out where several layers disagree: only the proof knows which count where.
    """
    config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    config = getattr(config, "get_text_config", lambda: config)()
    holders = [config] if config is not None else [vars(module) for module in (blocks[0].modules() if blocks else ())]
    inside = {module for block in blocks for module in block.modules()}
    vocabulary = [model.get_submodule(name) for name in find_vocabulary(model, inside)]
    rows = [module.num_embeddings for module in vocabulary if isinstance(module, nn.Embedding)]
    inner = _number(holders, INNER)
    return SplitSizes(
        num_heads=_number(holders, HEADS),
        num_key_value_heads=_number(holders, KEY_VALUE_HEADS),
        vocabulary_size=rows[0] if rows else None,
        widths=() if inner is None else (("outputs of the MLP's first layer", inner),),
    )


def _number(holders: Iterable[Any], names: Sequence[str]) -> int | None:
    found = set()
    for holder in holders:
        values = [holder.get(n) if isinstance(holder, dict) else getattr(holder, n, None) for n in names]
        found |= {value for value in values if type(value) is int}
    return found.pop() if len(found) == 1 else None
