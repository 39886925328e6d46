"""Why a key has no effect in a run: the reasons of the config, of the plan, and of this very run, in that order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config.remarks import NOT_SWITCHED_ON, WITHOUT_EFFECT, remarks
from engine.plan.findings import plural
from engine.plan.ineffective import INEFFECTIVE, at_this_stage, value_at

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.keys import Key
    from engine.plan.plan import Plan

NOT_FOR_TRAINING = "training.steps is given and counts"


@dataclass(frozen=True)
class Inert:
    """``reason`` why a key has no effect; ``honoured``: its value asks for what happens anyway."""

    reason: str
    honoured: bool = False


class InertKeys:
    """Answers for one config in one world. ``plan`` is None where there is no batch to plan for."""

    def __init__(self, config: Config, plan: Plan | None) -> None:
        self.config, self.plan = config, plan
        self.remarks = {path: why for path, why in remarks(config) if why != NOT_SWITCHED_ON}
        self.ineffective = {entry.path: entry for entry in INEFFECTIVE}

    def __call__(self, key: Key) -> Inert | None:
        """Why ``key`` has no effect, None where it has one."""
        if key.absent is not None:
            return Inert(f"{key.absent} is not given")
        found = self._by_table(key) or self._by_section(key) or self._here(key)
        if found is None and (reason := self.remarks.get(key.path)) is not None:
            return Inert(reason)
        return found

    def _by_table(self, key: Key) -> Inert | None:
        path = key.path
        for prefix in _prefixes(path):
            if prefix in WITHOUT_EFFECT:
                reason, harmless = WITHOUT_EFFECT[prefix]
                return Inert(reason, prefix == path and key.value in harmless)
        for prefix in _prefixes(path):
            below = at_this_stage(prefix, self.config.zero_optimization.stage)
            if below is not None:
                return Inert(below)
            if prefix in self.ineffective:
                entry = self.ineffective[prefix]
                return Inert(entry.reason, prefix == path and key.value in entry.honoured)
        return None

    def _by_section(self, key: Key) -> Inert | None:
        if key.path.startswith("fp16.") and self._scales_the_loss():
            return None
        if key.switch is None or key.switch in WITHOUT_EFFECT or key.switch == key.path:
            around = list(_prefixes(key.path))[1:]
            return next((Inert(self.remarks[section]) for section in around if section in self.remarks), None)
        section, _, name = key.switch.rpartition(".")
        value = key.value if key.switch == key.path else value_at(self.config, key.switch)
        return Inert(f"{section} is off: {name} is {_json(value)}")

    def _scales_the_loss(self) -> bool:
        return self.plan is not None and "fp16" in (self.plan.precision.compute, self.plan.precision.autocast)

    def _here(self, key: Key) -> Inert | None:
        if self.plan is None:
            return None
        rule = HERE.get(key.path)
        reason = rule(self.plan, key.value) if rule is not None else None
        return None if reason is None else Inert(reason)


def _prefixes(path: str) -> Iterator[str]:
    """The path itself, then the sections around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _json(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


# --- what depends on more than one key, or on the number of ranks ---

Rule = Callable[["Plan", Any], str | None]


def _alone(plan: Plan, value: Any) -> str | None:
    return "there is one data-parallel rank, so nothing is sent" if plan.degrees.dp == 1 else None


def _steps_given(plan: Plan, value: Any) -> str | None:
    return NOT_FOR_TRAINING if value is not None and plan.config.training.steps is not None else None


def _beyond_the_end(plan: Plan, value: Any) -> str | None:
    steps = plan.config.training.steps
    if value is None or steps is None or value < steps:
        return None
    return f"training ends after {plural(steps, 'step')}, and what is due then happens anyway"


def _saves(plan: Plan, value: Any) -> str | None:
    return (
        "a script saves by itself, with save_checkpoint()"
        if plan.config.model is None
        else _beyond_the_end(plan, value)
    )


def _evaluates(plan: Plan, value: Any) -> str | None:
    return _no_model(plan, value) or _beyond_the_end(plan, value)


def _epochs(plan: Plan, value: Any) -> str | None:
    return _steps_given(plan, value) or _no_model(plan, value)


def _no_model(plan: Plan, value: Any) -> str | None:
    return "the config has no model, so a script brings model, data and loop" if plan.config.model is None else None


def _lr_replaced(plan: Plan, value: Any) -> str | None:
    """Schedules that set the learning rate in absolute numbers leave nothing of the optimizer's own."""
    schedule = plan.schedule
    if schedule is None:
        return None
    sets = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr",
            "LRRangeTest": "lr_range_test_min_lr", "OneCycleLR": "max_lr", "CyclicLR": "max_lr"}  # fmt: skip
    key = sets.get(schedule.type)
    rate = schedule.params.get(key) if key is not None else None
    if rate is None:
        return None
    size = f" {rate:g}" if isinstance(rate, int | float) else ""
    return f"{schedule.type} sets the learning rate itself, by {key}{size}"


def _fixed_scale(plan: Plan, value: Any) -> str | None:
    scale = plan.precision.loss_scale
    return None if scale.dynamic else f"the loss scale is fixed at {scale.static:g}"


def _no_hysteresis(plan: Plan, value: Any) -> str | None:
    if plan.precision.loss_scale.dynamic and plan.precision.loss_scale.hysteresis == 1:
        return "hysteresis is 1, so no overflow is forgiven"
    return _fixed_scale(plan, value)


def _one_at_a_time(plan: Plan, value: Any) -> str | None:
    return "gradients accumulate in fp32 whatever it says" if plan.zero.stage == 3 and plan.degrees.dp > 1 else None


def _summed(plan: Plan, value: Any) -> str | None:
    if plan.zero.reduce_op == "sum":
        return "gradient_allreduce_op is sum, which divides nothing"
    return _alone(plan, value)


def _predivided(plan: Plan, value: Any) -> str | None:
    if value != 1.0 and plan.config.prescale_gradients:
        return "prescale_gradients divides by all ranks beforehand"
    return _summed(plan, value)


HERE: dict[str, Rule] = {
    "zero_optimization.reduce_bucket_size": _alone,
    "zero_optimization.prefetch_bucket_size": _alone,
    "communication_data_type": _alone,
    "gradient_allreduce_op": _alone,
    "prescale_gradients": _summed,
    "gradient_predivide_factor": _predivided,
    "data_types.grad_accum_dtype": _one_at_a_time,
    "training.num_epochs": _epochs,
    "training.eval_interval": _evaluates,
    "training.save_interval": _saves,
    "data.path": _no_model,
    "data.sequence_length": _no_model,
    "data.num_workers": _no_model,
    "data.validation_fraction": _no_model,
    "training.eval_batches": _no_model,
    "training.sample_length": _no_model,
    "optimizer.params.lr": _lr_replaced,
    "fp16.initial_scale_power": _fixed_scale,
    "fp16.loss_scale_window": _fixed_scale,
    "fp16.hysteresis": _fixed_scale,
    "fp16.consecutive_hysteresis": _no_hysteresis,
    "fp16.min_loss_scale": _fixed_scale,
}
