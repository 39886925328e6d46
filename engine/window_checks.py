"""What a window must be before the step may use it; each refusal is one sentence with its way out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engine.contracts import EngineError
from engine.data.batch import describe
from engine.parameters import ParameterRegistry
from engine.window import Window


def check_loss(value: Any, is_sum: bool, window: Window) -> None:
    """Raises EngineError for a loss that `Engine.backward` cannot take."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        reason = ""
        if isinstance(value, Tensor) and value.numel() == 1:
            reason = " without one (was it computed under no_grad, or detached?)"
        raise EngineError(f"backward() takes a scalar loss with a graph; it got {describe(value)}{reason}")
    if window.num_losses and is_sum != bool(window.num_counted):
        raise EngineError("a window mixes LossSum with mean losses; use one kind for all micro-batches of a step")


def changed_parameters(registry: ParameterRegistry, model: nn.Module, also_strangers: bool) -> list[str]:
    """Parameters that have begun to ask for gradients since initialize(). Looking for added ones walks the model."""
    return registry.unfrozen() + (registry.strangers(model) if also_strangers else [])


def refuse_unfrozen(where: str, registry: ParameterRegistry, model: nn.Module) -> None:
    """Raises EngineError for the parameters that `changed_parameters` found."""
    unfrozen, strangers = registry.unfrozen(), registry.strangers(model)
    if strangers:
        raise EngineError(
            f"{where}: {_some(strangers)} came into the model after initialize(), so nothing reduces or updates it; "
            "build the whole model first, then call initialize()"
        )
    raise EngineError(
        f"{where}: {_some(unfrozen) or 'a parameter of another rank'} was frozen when initialize() was called and has "
        "requires_grad=True now, so nothing reduces or updates it; call initialize() while it is trainable and freeze "
        "it with requires_grad_(False) afterwards: until it is turned on again it neither moves nor has optimizer state"
    )


def foreign_scale_message(where: str, scale: float, is_plain: bool) -> str:
    """Gradients whose backward did not multiply the loss by this engine's ``scale``, on some rank."""
    if is_plain:
        return (
            f"{where}: gradients came from loss.backward(), without the loss scale {scale:g}; the scale is applied in "
            "backward(), so call model_engine.backward(loss) instead for every loss of a step, or train in bf16"
        )
    return (
        f"{where}: gradients came from the backward of another engine, with another loss scale than {scale:g}; give "
        "engines that share a loss one static fp16.loss_scale, or train them in bf16"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
