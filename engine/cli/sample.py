"""A sample of what the model has learned to write, for text, whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.contracts import EngineError
from engine.data.batch import describe
from engine.data.sources import BYTE_VOCABULARY_SIZE


@torch.no_grad()
def sample_text(model_engine: Any, length: int) -> str:
    """`length` characters that the model writes after a line break, one token per forward. Every rank calls it.

    All ranks draw the same tokens, from a generator that training never sees. Raises EngineError where the model,
    called with `input_ids` (1, length) alone, returns no logits (1, length, vocabulary).
    """
    config, device = model_engine.plan.config, model_engine.mesh.device
    generator = torch.Generator(device).manual_seed(config.seed)
    token_ids = torch.tensor([[ord("\n")]], device=device)
    was_training = model_engine.module.training
    # called directly, a model sees whole sequences also where the engine cuts them over ranks
    model = model_engine.module if model_engine.mesh.num_slices > 1 else model_engine
    model_engine.module.eval()
    text = ""
    try:
        # Several bytes can make one character, so the first round may fall short.
        while len(text) < length:
            for _ in range(length - len(text)):
                logits = logits_of(model(input_ids=token_ids[:, -config.data.sequence_length :]))
                probabilities = logits[:, -1, :BYTE_VOCABULARY_SIZE].float().softmax(dim=-1)
                token_ids = torch.cat([token_ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
            text = readable(bytes(token_ids[0, 1:].tolist()))
    finally:
        model_engine.module.train(was_training)
    return text[:length]


def logits_of(output: Any) -> Tensor:
    """The logits (batch, length, vocabulary) in what a model returns: a tensor, `.logits`, or `["logits"]`."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.ndim == 3:
        return logits
    raise EngineError(f"called with input_ids alone, the model returned {describe(output)}, which holds no logits")


def readable(text: bytes) -> str:
    """Text that is safe to print: no broken bytes, no control characters that would move a terminal's cursor."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
