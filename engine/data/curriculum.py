"""How hard the data is at a step (JSON ``curriculum_learning``; Li et al., arXiv 2108.06084 and 2212.03597).

Pure functions of the step t, which counts from 1 the step that is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.contracts import EngineError
from engine.plan.plan import DifficultySchedule

DifficultyFunction = Callable[[int], float]
"""A schedule of the user's own: from the step to the difficulty."""


def difficulty_at(schedule: DifficultySchedule, step: int, function: DifficultyFunction | None = None) -> float:
    """The difficulty at step ``step`` >= 1.

    fixed_linear and fixed_root, with T steps from min to max and r the degree (1 for linear)::

        d = floor((t / T)^(1/r) * (max - min) + min), then down to a multiple of ``step_size``

    clamped to [min, max], and max from t = T on. fixed_discrete: the first difficulty whose last step is not behind,
    the last one afterwards. custom: ``function(step)``, clamped.

    ``schedule.deepspeed``: no lower bound, and the maximum only when the formula gives it: with a maximum that is no
    multiple of ``step_size`` that is after T steps. fixed_discrete stays at the first difficulty that is at least the
    maximum. Raises EngineError where a custom schedule has no function, or it returns no number.
    """
    if schedule.type == "custom":
        return _clamp(schedule, _custom(function, step))
    if schedule.type == "fixed_discrete":
        return _discrete(schedule, step)
    if schedule.deepspeed:
        return (
            schedule.minimum if schedule.minimum >= schedule.maximum else min(_paced(schedule, step), schedule.maximum)
        )
    return schedule.maximum if step >= schedule.total_steps else _clamp(schedule, _paced(schedule, step))


def _paced(schedule: DifficultySchedule, step: int) -> int:
    low, high, total = schedule.minimum, schedule.maximum, schedule.total_steps
    degree = 1.0 if schedule.type == "fixed_linear" else schedule.root_degree
    if degree == 1.0 and isinstance(low, int) and isinstance(high, int) and not schedule.deepspeed:
        value = step * (high - low) // total + low  # exact, where a quotient of floats may fall short of an integer
    else:
        value = math.floor((step / total) ** (1.0 / degree) * (high - low) + low)
    return value - value % schedule.step_size


def _discrete(schedule: DifficultySchedule, step: int) -> float:
    if schedule.deepspeed and schedule.minimum >= schedule.maximum:
        return schedule.minimum
    for index, difficulty in enumerate(schedule.difficulties):
        is_last = index >= len(schedule.last_steps)
        if is_last or step <= schedule.last_steps[index] or (schedule.deepspeed and difficulty >= schedule.maximum):
            return difficulty if schedule.deepspeed else _clamp(schedule, difficulty)
    raise EngineError("a fixed_discrete schedule needs at least one difficulty")


def _custom(function: DifficultyFunction | None, step: int) -> float:
    if function is None:
        raise EngineError(
            'schedule_type is "custom", and there is no function: call '
            "engine.set_custom_curriculum_learning_schedule({metric: function}) before the first step; "
            "function(step) returns the difficulty"
        )
    value = function(step)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineError(f"the custom curriculum schedule returned {value!r} at step {step}; it must return a number")
    return value


def _clamp(schedule: DifficultySchedule, value: float) -> float:
    return min(max(value, schedule.minimum), schedule.maximum)
