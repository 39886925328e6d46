"""Progressive layer dropping (Zhang & He, arXiv 2010.13369) in the plan: its formulas and what it cannot go with.

A layer is kept with a probability that falls with its depth and with training. No torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from engine.plan.plan import LayerDropPlan, Plan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

SECTION = "progressive_layer_drop"


def theta_at(step: int, theta: float, gamma: float) -> float:
    """``(1 - theta) * exp(-gamma * step) + theta`` after ``step`` steps: 1 at the start, ``theta`` in the end."""
    return (1.0 - theta) * math.exp(-gamma * step) + theta


def theta_in(plan: LayerDropPlan, applied_steps: int, global_steps: int) -> float:
    """Of the step that follows so many: those that updated the model count; with DeepSpeed's numbers all but the last
    one do, skipped ones included."""
    step = max(0, global_steps - 1) if plan.deepspeed else applied_steps
    return theta_at(step, plan.theta, plan.gamma)


def keep_probability(layer: int, num_layers: int, theta: float) -> float:
    """``1 - layer / num_layers * (1 - theta)`` of layers 1 to ``num_layers``: ``theta`` for the last one."""
    return 1.0 - layer / num_layers * (1.0 - theta)


def resolve_layer_drop(config: Config, findings: Findings) -> LayerDropPlan | None:
    """None where it is not switched on."""
    section = config.progressive_layer_drop
    if section is None or not section.enabled:
        return None
    result = LayerDropPlan(
        findings.resolved(f"{SECTION}.theta", section.theta),
        findings.resolved(f"{SECTION}.gamma", section.gamma),
        section.compat == "deepspeed",
    )
    _note_reach(result, config, findings)
    return result


def _note_reach(plan: LayerDropPlan, config: Config, findings: Findings) -> None:
    """Settings that drop nothing, or almost nothing, within the run."""
    if plan.theta == 1.0:
        findings.note(f"{SECTION}.theta", "no effect: a theta of 1 keeps every layer")
        return
    if plan.gamma == 0.0:
        findings.note(f"{SECTION}.gamma", "no effect: with a gamma of 0 theta stays at 1 and every layer is kept")
        return
    steps = config.training.steps
    if steps is not None and plan.gamma * steps < 1.0:
        last = theta_at(steps - 1, plan.theta, plan.gamma)
        findings.note(
            f"{SECTION}.gamma",
            f"theta only falls to {last:.3g} in the last of {steps} steps, and is to reach {plan.theta:g}: the paper's "
            f"gamma for this run would be about 100 / {steps} = {100 / steps:.2g}",
        )


def describe_layer_drop(plan: Plan) -> str:
    """One line for the printed plan."""
    drop = plan.layer_drop
    assert drop is not None
    scale = "as in DeepSpeed's example" if drop.deepspeed else "unbiased"
    text = f"theta from 1 to {drop.theta:g}, gamma {drop.gamma:g}; {scale}"
    steps = plan.config.training.steps
    if steps is None:
        return text
    return f"{text}; theta {theta_in(drop, steps - 1, steps - 1):.3g} in step {steps}"


def _enabled(plan: Plan, value: Any) -> str | None:
    if not value or plan.layer_drop is None:
        return None
    share = (1.0 - plan.layer_drop.theta) / 2.0
    return (
        "In training, layers are left out at random, deep ones more often than early ones; towards the end about "
        f"{share:.0%} of a deep model's layers. Evaluation runs all of them."
    )


def _theta(plan: Plan, value: Any) -> str | None:
    drop = plan.layer_drop
    if drop is None:
        return None
    if drop.theta == 1.0:
        return "Every layer is kept."
    return f"In the end the last layer is kept with probability {drop.theta:g}, the middle one with {_middle(drop):g}."


def _middle(drop: LayerDropPlan) -> float:
    return keep_probability(1, 2, drop.theta)


def _gamma(plan: Plan, value: Any) -> str | None:
    drop, steps = plan.layer_drop, plan.config.training.steps
    if drop is None or not drop.gamma or drop.theta == 1.0:
        return None
    half = math.log(2.0) / drop.gamma
    text = f"Theta is half-way after {half:,.0f} updates"
    return f"{text}." if steps is None else f"{text}, and {theta_in(drop, steps - 1, steps - 1):.3g} in the last one."


LAYER_DROP_SENTENCES = {
    f"{SECTION}.enabled": _enabled,
    f"{SECTION}.theta": _theta,
    f"{SECTION}.gamma": _gamma,
}
"""Canonical path -> the sentence of a run."""
