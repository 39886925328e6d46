"""The learning-rate schedule a config means: its canonical name and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.config.suggest import nearest
from engine.plan.findings import plural
from engine.plan.plan import OptimizerPlan, SchedulePlan
from engine.plan.schedule_table import OURS, TORCH, UNUSABLE, ScheduleSpec

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

PATH = "scheduler.type"
PARAMS = "scheduler.params"
KNOWN: Mapping[str, ScheduleSpec] = {**OURS, **TORCH}
TORCH_MODULE = "torch.optim.lr_scheduler."


def resolve_schedule(config: Config, optimizer: OptimizerPlan | None, findings: Findings) -> SchedulePlan | None:
    """None when the JSON names no schedule (the client may bring one) or one that cannot be used here.

    The config has brought known names to their canonical spelling.
    """
    section = config.scheduler
    if section is None:
        return None
    if section.type is None:
        return None
    name = section.type.replace(":", ".").removeprefix(TORCH_MODULE)
    if name in UNUSABLE:
        repair = "pass lr_scheduler to initialize()"
        message = f"{name} {UNUSABLE[name]}, which JSON cannot hold"
        findings.problem(PATH, message, found=name, repair=repair, code="unusable-type", options=tuple(KNOWN))
        return None
    spec = KNOWN.get(name)
    if spec is None:
        repair = "pass lr_scheduler to initialize() for a class of your own"
        message = f"there is no schedule {name}"
        findings.problem(PATH, message, found=name, allowed=", ".join(KNOWN), repair=repair, code="unknown-type")
        return None
    if config.optimizer is None:
        findings.note(PATH, f"{name} follows the optimizer that is passed to initialize(): the JSON names none")
    params = {**spec.defaults, **section.params}
    _fill_autos(spec, params, config, optimizer, findings)
    if name in TORCH:
        _check_names(name, spec, section.params, findings)
    _fill_required(name, spec, params, config, findings)
    _check_steps(name, params, findings)
    _note_readings(name, params, findings)
    _check_length(name, spec, params, config, findings)
    findings.resolved(PATH, name)
    told = {resolved.path for resolved in findings.values}
    for key, value in params.items():
        if f"{PARAMS}.{key}" not in told:
            reason = "the optimizer's learning rate" if key == "warmup_max_lr" and value is None else ""
            findings.resolved(f"{PARAMS}.{key}", value, reason)
    return SchedulePlan(name, params)


def _fill_autos(
    spec: ScheduleSpec,
    params: dict[str, Any],
    config: Config,
    optimizer: OptimizerPlan | None,
    findings: Findings,
) -> None:
    """Every "auto" replaced: lengths by training.steps, the peak by the optimizer's learning rate."""
    steps = config.training.steps
    peak = optimizer.params.get("lr") if optimizer is not None else None
    for path in sorted(config.autos):
        if not path.startswith(PARAMS + "."):
            continue
        key = path.removeprefix(PARAMS + ".")
        if key in spec.lengths and steps is not None:
            params[key] = findings.resolved(path, steps, "training.steps", "auto")
        elif key == "warmup_max_lr" and peak is not None:
            params[key] = findings.resolved(path, peak, "the optimizer's lr", "auto")


def _check_names(name: str, spec: ScheduleSpec, given: Mapping[str, Any], findings: Findings) -> None:
    for key, value in given.items():
        if key not in spec.names:
            close = nearest(key, spec.names)
            findings.problem(
                f"{PARAMS}.{key}",
                f"{name} has no parameter {key!r}",
                found=value,
                allowed=", ".join(spec.names),
                repair=f"did you mean {close}?" if close else "delete it",
                code="unknown-key",
            )


def _fill_required(name: str, spec: ScheduleSpec, params: dict[str, Any], config: Config, findings: Findings) -> None:
    """A length that is left out is the run's own, where that is known."""
    steps = config.training.steps
    required = spec.required
    if name == "OneCycleLR" and not {"epochs", "steps_per_epoch"} <= params.keys():
        required = (*required, "total_steps")
    for key in required:
        path = f"{PARAMS}.{key}"
        if key in params or findings.is_auto(path):
            continue
        if key in spec.lengths and steps is not None:
            params[key] = findings.resolved(path, steps, "training.steps", "derived")
        else:
            findings.problem(
                path,
                f"{name} needs {key}",
                repair=f'add "{key}" to {PARAMS}',
                code="missing-key",
                options=("an integer >= 1" if key in spec.lengths else f"what torch's {name} takes",),
            )


def _note_readings(name: str, params: Mapping[str, Any], findings: Findings) -> None:
    """Where a schedule is not what its parameters seem to say, or not DeepSpeed's."""
    if name == "OneCycle" and params.get("cycle_momentum", True) and params.get("compat") != "deepspeed":
        findings.note(
            f"{PARAMS}.cycle_momentum",
            "the momentum begins at its maximum and the second beta is left alone; DeepSpeed begins at the minimum and "
            'sets 0.99, as compat "deepspeed" does here',
        )
    path = f"{PARAMS}.warmup_num_steps"
    if name in OURS and params.get("warmup_num_steps") == 1:
        findings.note(path, "1 is read as 2, as in DeepSpeed: the formula of the warm-up needs two steps")
    elif name in OURS and params.get("warmup_num_steps") == 0:
        findings.note(path, "0 is no warm-up (DeepSpeed refuses it)")


def _check_steps(name: str, params: Mapping[str, Any], findings: Findings) -> None:
    """Sizes that a schedule divides by."""
    for key in ("lr_range_test_step_size", "cycle_first_step_size"):
        value = params.get(key, 1)
        if not isinstance(value, int) or value < 1:
            findings.problem(
                f"{PARAMS}.{key}",
                f"{name} cycles over {value} steps",
                found=value,
                allowed="an integer >= 1",
                repair="leave it out for the default, 2000",
                code="value",
            )


def _check_length(name: str, spec: ScheduleSpec, params: Mapping[str, Any], config: Config, findings: Findings) -> None:
    """Lengths that do not fit together are rarely meant."""
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    steps = config.training.steps
    if warmup is not None and total is not None and warmup > total:
        findings.note(
            f"{PARAMS}.warmup_num_steps",
            f"the warm-up of {warmup} steps is longer than the schedule of {total} steps: the learning rate drops to "
            "its end in one step when the warm-up is over",
        )
    elif steps is not None and isinstance(warmup, int) and warmup >= steps:
        reached = "is over only when training ends" if warmup == steps else "is never over"
        findings.note(
            f"{PARAMS}.warmup_num_steps",
            f"the warm-up of {warmup} steps {reached}: training takes {plural(steps, 'step')}",
        )
    for key in spec.lengths:
        length = params.get(key)
        if steps is None or not isinstance(length, int) or length >= steps:
            continue
        path, fact = f"{PARAMS}.{key}", f"{name} ends after {length} of the {steps} training steps"
        if name == "OneCycleLR":
            repair = f"set {key} or training.steps so that they agree"
            findings.problem(
                path, f"{fact}, and refuses to go on", found=length, allowed=f"at least {steps}", repair=repair
            )
        else:
            then = "rises again" if name == "CosineAnnealingLR" else "stays at its end value"
            findings.note(path, f"{fact}: for the last {steps - length} the learning rate {then}")
