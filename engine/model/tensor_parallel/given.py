"""A plan that a model brings along: its attribute ``tensor_plan``."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.config.messages import EngineError
from engine.model.tensor_parallel.split import TensorPlan


def tensor_plan_of(model: nn.Module, plan: Any) -> TensorPlan | None:
    """``model.tensor_plan``, a `TensorPlan`; None without one. Raises EngineError for anything else under that name."""
    found = getattr(model, "tensor_plan", None)
    if found is not None and not isinstance(found, TensorPlan):
        raise EngineError(
            f"{type(model).__name__}.tensor_plan is a {type(found).__name__}; it is taken for an "
            "engine.model.tensor_parallel.TensorPlan, so give it another name or make it one"
        )
    return found
