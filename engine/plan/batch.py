"""The batch triangle: `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.findings import divisors, plural
from engine.plan.plan import BatchPlan, Degrees, World
from engine.plan.world import describe_world

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
NO_BATCH = f"no batch size: neither {TOTAL} nor {MICRO} is given"
ADD_BATCH = f'add "{MICRO}": 8, for example; the rest follows from it'


def resolve_batch(config: Config, world: World, degrees: Degrees, findings: Findings) -> BatchPlan | None:
    """All three numbers from those given ("auto" counts as missing), in exact integers.

    None when they cannot be, or when the degrees do not fill the world: then it is not known over how many ranks a
    batch is spread.
    """
    given = {
        key: value
        for key in (TOTAL, MICRO, ACCUMULATION)
        if (value := getattr(config, key)) is not None and not findings.is_auto(key)
    }
    if TOTAL not in given and MICRO not in given:
        _report_missing(findings)
        return None
    if degrees.size != world.size:
        return None

    dp = degrees.dp
    total, micro, accumulation = given.get(TOTAL), given.get(MICRO), given.get(ACCUMULATION)
    ranks = f"{plural(dp, 'data-parallel rank')} of {describe_world(world)}"
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        total = micro * accumulation * dp
    elif micro is not None and accumulation is not None:
        if total != micro * accumulation * dp:
            _report_mismatch(total, micro, accumulation, dp, ranks, findings)
            return None
    else:
        divided_by = {MICRO: micro} if micro is not None else {ACCUMULATION: accumulation or 1}
        ((key, factor),) = divided_by.items()
        assert factor is not None
        if total % (factor * dp):
            _report_remainder(total, key, factor, dp, ranks, findings)
            return None
        other = total // (factor * dp)
        micro, accumulation = (factor, other) if key == MICRO else (other, factor)

    assert micro is not None
    assert accumulation is not None
    reason = f"{plural(total, 'sample')} = {micro} micro x {accumulation} accumulation x {dp} dp"
    for key, value in ((TOTAL, total), (MICRO, micro), (ACCUMULATION, accumulation)):
        if key in given:
            findings.resolved(key, value)
        elif key == ACCUMULATION and len(given) == 1:
            findings.resolved(key, value, "one micro-batch per update unless asked otherwise", "default")
        else:
            findings.resolved(key, value, reason, "derived")
    managed = config.managed_gradient_accumulation
    if not managed:
        findings.note(
            "managed_gradient_accumulation",
            "every step() applies an update and gradients are summed over micro-batches, not averaged; "
            "gradient_accumulation_steps only enters the batch arithmetic",
        )
    return BatchPlan(total, micro, accumulation, managed)


def _report_missing(findings: Findings) -> None:
    if findings.is_auto(TOTAL) or findings.is_auto(MICRO):
        return  # listed with the other values that are needed
    findings.needs_values.append(MICRO)
    findings.note(MICRO, f"{NO_BATCH}; {ADD_BATCH}")


def _report_mismatch(total: int, micro: int, accumulation: int, dp: int, ranks: str, findings: Findings) -> None:
    product = micro * accumulation * dp
    repairs = [f"{TOTAL} {product}"]
    if total % (micro * dp) == 0:
        repairs.append(f"{ACCUMULATION} {total // (micro * dp)}")
    if total % (accumulation * dp) == 0:
        repairs.append(f"{MICRO} {total // (accumulation * dp)}")
    findings.problem(
        TOTAL,
        f"{total} contradicts {_named(MICRO, micro, findings)} x "
        f"{_named(ACCUMULATION, accumulation, findings)} x {ranks} = {product}",
        found=total,
        allowed=_nearest_multiples(total, micro * accumulation * dp),
        repair="set " + " or ".join(repairs) + ", or remove one of the three",
        code="batch-arithmetic",
    )


def _report_remainder(total: int, key: str, factor: int, dp: int, ranks: str, findings: Findings) -> None:
    unit = factor * dp
    by = f"{_named(key, factor, findings)} x " if findings.is_given(key) else ""
    product = f" = {unit}" if by else ""
    fits = _nearest_multiples(total, unit)
    repair = f"set {TOTAL} to {fits}"
    if by and total % dp == 0:
        options = divisors(total // dp)
        closest = min(options, key=lambda option: (abs(option - factor), option))
        repair += f", or keep it and set {key} to {closest}"
    arithmetic = f": {total} = {total // unit} x {unit} + {total % unit}" if total > unit else ""
    findings.problem(
        TOTAL,
        f"{total} is not a multiple of {by}{ranks}{product}{arithmetic}",
        found=total,
        allowed=f"a multiple of {unit}",
        repair=repair,
        code="batch-arithmetic",
    )


def _named(key: str, value: int, findings: Findings) -> str:
    return f"{key} {value} ({findings.source(key)})"


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)
