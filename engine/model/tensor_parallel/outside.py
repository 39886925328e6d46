"""The layers around the blocks that are cut over the vocabulary: token embedding and output layer."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from engine.model.tensor_parallel.capture import BATCH, LENGTHS, Call
from engine.model.tensor_parallel.matrices import matrix_of
from engine.model.tensor_parallel.sketch import PURPOSE, SEED
from engine.model.tensor_parallel.split import Split
from engine.random import generator


def find_vocabulary(model: nn.Module, inside: Collection[nn.Module], with_head: bool = True) -> dict[str, Split]:
    """The token embedding and the output layer by name, the latter only if there is one of the same vocabulary.

    Without ``with_head`` an embedding that shares its weight with the output layer stays whole as well. ``inside``: the
    modules of the blocks, which are not looked at. Where the model says which they are (transformers'
    ``get_input_embeddings``), that counts; else the embedding with the most rows, and the linear layer that shares its
    weight or has as many outputs.
    """
    names = {module: name for name, module in model.named_modules() if module not in inside}
    embeddings = [module for module in names if isinstance(module, nn.Embedding)]
    told = _told(model, "get_input_embeddings")
    embedding = told if told in embeddings else max(embeddings, key=lambda e: e.num_embeddings, default=None)
    if not isinstance(embedding, nn.Embedding) or not _can_be_cut(embedding):
        return {}
    found = {names[embedding]: Split("vocabulary")}
    heads = [m for m in names if (matrix := matrix_of(m)) and matrix.num_outputs == embedding.num_embeddings]
    tied = [head for head in heads if head.weight is embedding.weight]
    head = next(iter([m for m in heads if m is _told(model, "get_output_embeddings")] or tied or heads), None)
    if not with_head:
        return {} if tied else found
    if head is not None:
        matrix = matrix_of(head)
        found[names[head]] = Split("head", transposed=matrix is not None and matrix.transposed)
    return found


def _can_be_cut(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq


def _told(model: nn.Module, method: str) -> nn.Module | None:
    ask: Callable[[], nn.Module | None] | None = getattr(model, method, None)
    try:
        return ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        # transformers' own answer of a model that has no such layer (PreTrainedModel.get_input_embeddings): the search
        # goes on by sizes, as it does for a model that was never asked
        return None


def call_alone(module: nn.Module, size: int, device: torch.device) -> Call:
    """Inputs that try a layer by itself: for an embedding every border between the parts of ``size`` ranks."""
    stream = generator(SEED, PURPOSE, "layer")
    if isinstance(module, nn.Embedding):
        rows, part = module.num_embeddings, -(-module.num_embeddings // size)
        borders = [row for rank in range(size) for row in (rank * part, (rank + 1) * part - 1) if row < rows]
        padding = [] if module.padding_idx is None else [module.padding_idx]
        ids = torch.tensor([*borders, *padding, rows - 1, *torch.randint(rows, (8,), generator=stream).tolist()])
        return Call((ids.unsqueeze(0).to(device),), {})
    matrix = matrix_of(module)
    assert matrix is not None
    inputs = torch.randn((BATCH, LENGTHS[0], matrix.num_inputs), generator=stream)
    return Call((inputs.to(device).requires_grad_(),), {})
