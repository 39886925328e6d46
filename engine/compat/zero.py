"""What scripts find under ``deepspeed.zero``."""

from __future__ import annotations

import logging
from typing import Any, Self

import torch

from engine.full_state import gathered

log = logging.getLogger("engine")


class GatheredParameters:
    """``with GatheredParameters(params, modifier_rank=0): ...``: see `engine.full_state.gathered`."""

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        tensors = [params] if isinstance(params, torch.Tensor) else [p for p in params if isinstance(p, torch.Tensor)]
        self._context = gathered(tensors if enabled else [], modifier_rank)

    def __enter__(self) -> list[torch.Tensor]:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Init:
    """Accepted, and without effect: the model is built whole and `initialize` cuts it. All of DeepSpeed's arguments are
    taken. To build a model that no rank could hold, build it under ``torch.device("meta")`` instead."""

    def __init__(self, module: Any = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        if enabled:
            log.info('zero.Init builds the model whole here; torch.device("meta") builds it without memory')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None: ...


def register_external_parameter(module: torch.nn.Module, parameter: torch.Tensor) -> None:
    """Nothing: at stage 3 a module's parameters are gathered with their unit (docs/full_state.md)."""


__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
