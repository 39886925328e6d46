"""Random layerwise token dropping in the plan (JSON ``data_efficiency.data_routing.random_ltd``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.plan.findings import plural
from engine.plan.plan import Degrees, DifficultySchedule, Plan, TokenDropPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.facts import ModelFacts
    from engine.plan.findings import Findings

SECTION = "data_efficiency.data_routing.random_ltd"
SCHEDULE = f"{SECTION}.random_ltd_schedule"


def resolve_token_drop(
    config: Config, degrees: Degrees, facts: ModelFacts | None, findings: Findings
) -> TokenDropPlan | None:
    """None where it is not switched on. The section has checked the schedule and the list of layers in themselves."""
    routing = config.data_efficiency.data_routing if config.data_efficiency is not None else None
    section = routing.random_ltd if routing is not None else None
    if section is None or not section.enabled:
        return None
    found = section.random_ltd_schedule
    settings = found.schedule_config if found is not None else None
    schedule = DifficultySchedule(
        "fixed_linear",
        findings.resolved(f"{SCHEDULE}.min_value", (found and found.min_value) or 1),
        findings.resolved(f"{SCHEDULE}.max_value", (found and found.max_value) or 1),
        total_steps=findings.resolved(
            f"{SCHEDULE}.schedule_config.require_steps", (settings and settings.require_steps) or 1
        ),
        step_size=findings.resolved(
            f"{SCHEDULE}.schedule_config.seq_per_step", (settings and settings.seq_per_step) or 1
        ),
        deepspeed=found is not None and found.compat == "deepspeed",
    )
    layers = section.random_ltd_layer_id
    findings.resolved(
        f"{SECTION}.random_ltd_layer_id", layers, "" if layers is not None else "all but the first and the last"
    )
    result = TokenDropPlan(
        schedule,
        None if layers is None else tuple(sorted(layers)),
        section.random_ltd_layer_num,
        section.total_layer_num,
        section.hidden_state_order,
        section.model_mask_name,
    )
    _check_axes(degrees, findings)
    _check_blocks(result, facts, findings)
    _note_reach(result, config, findings)
    return result


def _check_axes(degrees: Degrees, findings: Findings) -> None:
    for axis in ("cp", "sp"):
        size = getattr(degrees, axis)
        if size > 1:
            findings.problem(
                f"{SECTION}.enabled",
                f"tokens are dropped from whole sequences, layer by layer, and sequences are split over {size} ranks "
                f"({axis})",
                found=True,
                allowed="false",
                repair=f"switch random_ltd off, or set {axis} to 1",
            )


def _check_blocks(plan: TokenDropPlan, facts: ModelFacts | None, findings: Findings) -> None:
    if facts is None:
        return
    num_blocks = len(facts.blocks)
    if num_blocks == 0:
        findings.problem(
            f"{SECTION}.enabled",
            "the model has no repeated blocks, so there are no layers that could drop tokens",
            found=True,
            repair="model.blocks names them",
        )
    elif plan.num_layers is not None and plan.num_layers != num_blocks:
        findings.problem(
            f"{SECTION}.total_layer_num",
            f"the model has {num_blocks} blocks",
            found=plan.num_layers,
            allowed=str(num_blocks),
        )


def _note_reach(plan: TokenDropPlan, config: Config, findings: Findings) -> None:
    schedule, steps = plan.schedule, config.training.steps
    if steps is not None and schedule.total_steps >= steps:
        findings.note(
            f"{SCHEDULE}.schedule_config.require_steps",
            f"tokens are dropped to the end: max_value is reached after {plural(schedule.total_steps, 'step')}, and "
            f"training takes {steps}",
        )
    if config.model is None:
        return
    length = config.data.sequence_length
    if schedule.maximum < length:
        findings.note(
            f"{SCHEDULE}.max_value",
            f"no step keeps all tokens: {schedule.maximum:g} is below data.sequence_length {length}",
        )
    if schedule.minimum >= length:
        findings.note(
            f"{SCHEDULE}.min_value",
            f"no effect: sequences have {length} tokens (data.sequence_length), and as many are kept",
        )


def describe_token_drop(plan: Plan) -> str:
    """One line for the printed plan."""
    drop = plan.token_drop
    assert drop is not None
    schedule = drop.schedule
    layers = "all layers but the first and the last" if drop.layers is None else f"layers {_ranges(drop.layers)}"
    return (
        f"{layers} keep {schedule.minimum:g} to {schedule.maximum:g} tokens, over "
        f"{plural(schedule.total_steps, 'step')} by {schedule.step_size}"
    )


def _ranges(numbers: tuple[int, ...]) -> str:
    """ "1-3, 5" of (1, 2, 3, 5)."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _enabled(plan: Plan, value: Any) -> str | None:
    if not value or plan.token_drop is None:
        return None
    drop = plan.token_drop
    which = "All layers but the first and the last" if drop.layers is None else f"Layers {_ranges(drop.layers)}"
    return (
        f"{which} run on a random part of each sequence's tokens in training; the others pass them by. "
        "Evaluation uses all tokens."
    )


def _minimum(plan: Plan, value: Any) -> str | None:
    return None if plan.token_drop is None else f"The first step keeps {value} tokens of a sequence in those layers."


def _steps(plan: Plan, value: Any) -> str | None:
    if plan.token_drop is None:
        return None
    schedule = plan.token_drop.schedule
    return (
        f"The kept tokens grow by {schedule.step_size} at a time, and are {schedule.maximum:g} after "
        f"{plural(schedule.total_steps, 'update')}."
    )


TOKEN_DROP_SENTENCES = {
    f"{SECTION}.enabled": _enabled,
    f"{SCHEDULE}.min_value": _minimum,
    f"{SCHEDULE}.schedule_config.require_steps": _steps,
}
"""Canonical path -> the sentence of a run."""
