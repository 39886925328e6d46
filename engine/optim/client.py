"""A user's own optimizer, taken over: its groups and options stay, its parameters become this rank's shards.

The engine replaces the model's parameters by shards of their fp32 masters, so an optimizer built on the model holds
tensors that nothing reads any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from engine.contracts import EngineError
from engine.optim.factory import refuse_unusable
from engine.optim.optimizer import EngineOptimizer

Shards = Sequence[tuple[str, torch.nn.Parameter]]


def client_optimizer(
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None,
    model: torch.nn.Module,
    model_parameters: Iterable[Any] | None,
) -> torch.optim.Optimizer | None:
    """What the user passed as ``optimizer``: itself, or what the callable makes of ``model_parameters`` (default: the
    model's trainable ones). Raises EngineError where that is no optimizer."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    trainable = model_parameters if model_parameters is not None else (p for p in model.parameters() if p.requires_grad)
    made = optimizer(list(trainable))
    if not isinstance(made, torch.optim.Optimizer):
        raise EngineError(f"optimizer= was called and returned a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def rebind(optimizer: torch.optim.Optimizer, mapping: Callable[[torch.nn.Parameter], Shards | None]) -> EngineOptimizer:
    """Put the shards that ``mapping`` gives for a parameter in its place, in every group; options are kept.

    ``mapping`` returns (name, local fp32 parameter) pairs, none when this rank holds nothing of the parameter, and None
    (or raises KeyError) for a tensor that is not a parameter of the model. The object itself is changed, so a scheduler
    that was built on it keeps working. Raises EngineError, before anything is changed, for such a tensor, for an
    optimizer that has stepped, and for those that cannot work inside an engine step.
    """
    if isinstance(optimizer, EngineOptimizer):
        raise EngineError("This optimizer already belongs to an engine; build a new one for this model.")
    refuse_unusable(type(optimizer))
    kind = type(optimizer).__name__
    if not _is_fresh(optimizer):
        raise EngineError(
            f"The {kind} given to initialize() has already stepped: its state belongs to whole parameters and cannot "
            "be sharded. Build it anew, and resume through load_checkpoint()."
        )
    replaced = [_shards_of_group(kind, index, group, mapping) for index, group in enumerate(optimizer.param_groups)]
    for group, shards in zip(optimizer.param_groups, replaced, strict=True):
        group["params"] = [parameter for _, parameter in shards]
        group["param_names"] = [name for name, _ in shards]
    optimizer.state.clear()
    if isinstance(optimizer, torch.optim.Adagrad):
        _start_adagrad(optimizer)
    return EngineOptimizer([optimizer])


def _shards_of_group(
    kind: str, index: int, group: dict[str, Any], mapping: Callable[[torch.nn.Parameter], Shards | None]
) -> list[tuple[str, torch.nn.Parameter]]:
    shards: list[tuple[str, torch.nn.Parameter]] = []
    for parameter in group["params"]:
        try:
            found = mapping(parameter)
        except KeyError:
            found = None
        if found is None:
            raise EngineError(
                f"Parameter group {index} of the {kind} given to initialize() holds a tensor of shape "
                f"{tuple(parameter.shape)} that is not a parameter of the model; build the optimizer on the parameters "
                "of the model that you pass."
            )
        shards.extend(found)
    return shards


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it never stepped. Adagrad is the one that makes its state when it is built."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return all(float(state.get("step", 0.0)) == 0.0 for state in optimizer.state.values())
    return not any(optimizer.state.values())


def _start_adagrad(optimizer: torch.optim.Adagrad) -> None:
    initial = optimizer.defaults["initial_accumulator_value"]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step_device = parameter.device if group["fused"] else None
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                "sum": torch.full_like(parameter, initial),
            }
