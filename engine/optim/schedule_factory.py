"""From a `SchedulePlan` to a scheduler on an optimizer."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler

from engine.contracts import EngineError, NoSchedule
from engine.optim.one_cycle import OneCycle
from engine.optim.optimizer import EngineOptimizer
from engine.optim.schedules import ConstantSchedule, LRRangeTest, WarmupCosineLR, WarmupDecayLR, WarmupLR
from engine.optim.signatures import check_parameters, described
from engine.plan.plan import SchedulePlan

_OWN: dict[str, type[LRScheduler]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}
_NEEDS_FUNCTION = "it takes a Python function, which JSON cannot hold"
_NEEDS_SCHEDULERS = "it takes other scheduler objects, which JSON cannot hold"
_NOT_FROM_JSON = {
    "ReduceLROnPlateau": "its step() needs a metric, which the engine does not know",
    "LambdaLR": _NEEDS_FUNCTION,
    "MultiplicativeLR": _NEEDS_FUNCTION,
    "SequentialLR": _NEEDS_SCHEDULERS,
    "ChainedScheduler": _NEEDS_SCHEDULERS,
}


def available_schedules() -> list[str]:
    """Every ``scheduler.type`` that `build_schedule` accepts: ours first, then torch's."""
    found = [
        name
        for name in torch_schedules.__all__
        if isinstance(getattr(torch_schedules, name, None), type)
        and name not in (*_NOT_FROM_JSON, *_OWN, "LRScheduler")
    ]
    return [*_OWN, *sorted(found)]


def schedule_class(type_name: str) -> type[LRScheduler]:
    """The class behind a ``scheduler.type``. Raises EngineError for unknown names and those JSON cannot describe."""
    if type_name in _NOT_FROM_JSON:
        raise EngineError(
            f"scheduler.type {type_name!r} cannot come from JSON: {_NOT_FROM_JSON[type_name]}. "
            "Build it in Python and pass it as initialize(..., lr_scheduler=...)."
        )
    names = available_schedules()
    if type_name in _OWN:
        return _OWN[type_name]
    if type_name in names:
        found: type[LRScheduler] = getattr(torch_schedules, type_name)
        return found
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(type_name.lower(), by_lower, n=1)
    hint = f" Did you mean {by_lower[near[0]]!r}?" if near else ""
    raise EngineError(f"scheduler.type {type_name!r} is unknown.{hint} Known: {', '.join(names)}.")


def schedule_on(optimizer: EngineOptimizer | None, plan: SchedulePlan | None, client: Any) -> Any:
    """The client's scheduler, else the plan's; `NoSchedule` where nothing is optimized."""
    if optimizer is None:
        return NoSchedule()
    return build_schedule(plan, optimizer) if client is None else client_schedule(client, optimizer)


def build_schedule(plan: SchedulePlan | None, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule of the plan on ``optimizer``; without a plan the learning rates stay as they are.

    Raises EngineError naming the parameter when the class does not take ``plan.params``.
    """
    if plan is None:
        return ConstantSchedule(optimizer)
    cls = schedule_class(plan.type)
    check_parameters(cls, plan.params, "scheduler.params")
    try:
        return cls(optimizer, **plan.params)
    except EngineError:
        raise
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise EngineError(f"scheduler.params do not suit {plan.type}: {error}. It takes {described(cls)}.") from error


def client_schedule(scheduler: Any, optimizer: EngineOptimizer) -> Any:
    """The scheduler that the user passed, or what the user's callable makes of ``optimizer``.

    Raises EngineError for one that would have no effect, because it holds another optimizer, and for one whose
    ``step()`` needs a metric.
    """
    made = scheduler if not isinstance(scheduler, type) and hasattr(scheduler, "step") else scheduler(optimizer)
    name = type(made).__name__
    if isinstance(made, torch_schedules.ReduceLROnPlateau):
        raise EngineError(
            f"lr_scheduler= is a {name}, whose step() needs a metric that the engine does not know; leave it out of "
            "initialize() and step it yourself, built on the optimizer that initialize() returns"
        )
    held = getattr(made, "optimizer", None)
    if held is not None and held is not optimizer and held not in optimizer.inner:
        raise EngineError(
            f"lr_scheduler= is a {name} of another optimizer than the one that trains, so it would have no effect; "
            "pass its optimizer as optimizer= as well, or pass a callable that builds the scheduler from the optimizer"
        )
    return made
