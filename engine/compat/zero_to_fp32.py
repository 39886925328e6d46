"""What scripts import from ``deepspeed.utils.zero_to_fp32``, for checkpoints of this engine."""

from __future__ import annotations

import os

from torch import Tensor, nn

from engine.checkpoint import export, get_fp32_state_dict
from engine.checkpoint.export import DEFAULT_SHARD_SIZE

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """`engine.checkpoint.get_fp32_state_dict`. ``lazy_mode`` has no effect: the tensors are read, one by one."""
    return get_fp32_state_dict(checkpoint_dir, tag, exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = DEFAULT_SHARD_SIZE,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`engine.checkpoint.export` to ``output_dir``: model.safetensors with ``safe_serialization``, else
    pytorch_model.bin; None for ``max_shard_size`` writes one file."""
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    export(
        checkpoint_dir,
        os.path.join(output_dir, name),
        tag=tag,
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the fp32 weights into ``model``, which must have exactly those names. Returns it, on the CPU."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict(checkpoint_dir, tag))
    return model
