"""A config made small for a trial: its model by `model.tiny`, or by the sizes that Hugging Face's configs name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import Config

SMALL_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    "head_dim": 32,
}
"""Names that Hugging Face's model configs use, and what they become. The sizes suit each other."""

LENGTHS = ("sequence_length", "max_position_embeddings", "n_positions", "block_size", "max_length")
"""Arguments that bound how long a sample may be."""


def scaled_overrides(config: Config) -> tuple[list[str], list[str]]:
    """``--set`` settings (values as JSON) that make the run small, and what was done, in words."""
    import json

    if config.model is None:
        return [], []
    if config.model.tiny:
        changes, how = dict(config.model.tiny), "model.tiny"
    else:
        changes, how = dict(_shrunk(config.model.args)), "the sizes that Hugging Face's configs name"
    if not changes:
        return [], ["the model runs at its full size: model.tiny is not given, and no argument is a size that is known"]
    settings = [f"model.args.{path}={json.dumps(value)}" for path, value in changes.items()]
    lengths = [changes[name] for name in LENGTHS if isinstance(changes.get(name), int)]
    if lengths and min(lengths) < config.data.sequence_length:
        settings.append(f"data.sequence_length={min(lengths)}")
    shown = ", ".join(f"{path} {value}" for path, value in changes.items())
    return settings, [f"the model is made small by {how}: {shown}"]


def _shrunk(arguments: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Sizes in the arguments, also in dicts among them, that are larger than the small ones."""
    found: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            found += _shrunk(value, f"{prefix}{name}.")
        elif name in SMALL_SIZES and isinstance(value, int) and value > SMALL_SIZES[name]:
            found.append((f"{prefix}{name}", SMALL_SIZES[name]))
    return found
