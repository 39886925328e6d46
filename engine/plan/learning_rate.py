"""The learning rate of a run in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.plan.findings import plural

if TYPE_CHECKING:
    from engine.plan.plan import Plan


def base(plan: Plan) -> float | None:
    """The optimizer's own learning rate, None where it is not one known number."""
    rate = plan.optimizer.params.get("lr") if plan.optimizer is not None else None
    return float(rate) if isinstance(rate, int | float) else None


def peak(plan: Plan) -> float | None:
    """The highest learning rate of the run, None where it is not known from the config."""
    schedule = plan.schedule
    if schedule is None or schedule.type == "WarmupCosineLR":
        return base(plan)
    if schedule.type in ("WarmupLR", "WarmupDecayLR"):
        rate = schedule.params.get("warmup_max_lr")
        return base(plan) if rate is None else float(rate) if isinstance(rate, int | float) else None
    if schedule.type == "OneCycle":
        rate = schedule.params.get("cycle_max_lr")
        return float(rate) if isinstance(rate, int | float) else None
    return None


def curve(plan: Plan) -> str | None:
    """One sentence for DeepSpeed's schedules: ``0 to 0.002 over 30 updates (linear), then a cosine to ...``."""
    schedule = plan.schedule
    if schedule is None:
        return None
    params, top = schedule.params, peak(plan)
    if schedule.type.startswith("Warmup"):
        if top is None:
            return None
        steps, warmup = plan.config.training.steps, params.get("warmup_num_steps") or 0
        ends = steps is not None and warmup >= steps
        after = f"; training ends after {steps:,}" if ends else _after(schedule.type, params, top)
        return f"{_warmup(schedule.type, params, top)}{after}."
    if schedule.type == "OneCycle":
        up = params["cycle_first_step_size"]
        down = params.get("cycle_second_step_size") or up
        low, high = params.get("cycle_min_lr"), params.get("cycle_max_lr")
        return f"From {_number(low)} up to {_number(high)} over {up:,} updates, and back down over {down:,}."
    if schedule.type == "LRRangeTest":
        low, size = params["lr_range_test_min_lr"], params["lr_range_test_step_size"]
        rate = params["lr_range_test_step_rate"]
        return f"From {_number(low)} it grows by {rate:g} x {_number(low)} every {plural(size, 'update')}, without end."
    return f"torch.optim.lr_scheduler.{schedule.type}, moved on once per update."


def _warmup(name: str, params: dict[str, Any], top: float) -> str:
    steps = params.get("warmup_num_steps")
    if not steps:
        return f"The learning rate starts at {top:g}"
    low = params.get("warmup_min_ratio", 0) * top if name == "WarmupCosineLR" else params.get("warmup_min_lr", 0)
    shape = "in a straight line" if params.get("warmup_type") == "linear" else "along a logarithm"
    return f"The learning rate rises from {_number(low)} to {top:g} over {steps:,} updates, {shape}"


def _after(name: str, params: dict[str, Any], top: float) -> str:
    total = params.get("total_num_steps")
    if name == "WarmupLR" or total is None:
        return ", and stays there"
    if name == "WarmupDecayLR":
        return f", then falls in a straight line to {_number(params.get('warmup_min_lr', 0))} at update {total:,}"
    return f", then falls along a cosine to {params['cos_min_ratio'] * top:g} at update {total:,}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
