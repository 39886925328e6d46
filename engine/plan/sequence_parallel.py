"""Rules for `sequence_parallel_size` (Ulysses) and `parallel.context_parallel` (a ring)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.plan.facts import ModelFacts
from engine.plan.findings import divisors
from engine.plan.one_bit import ONE_BIT
from engine.plan.plan import CurriculumPlan, Degrees, OptimizerPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

SP, CP = "sequence_parallel_size", "parallel.context_parallel"


def length_unit(cp: int, sp: int) -> int:
    """What the length of a sequence must be a multiple of. Over cp > 1 each rank holds two chunks of equal length."""
    return cp * math.lcm(2, sp) if cp > 1 else sp


def check_slices(
    config: Config,
    degrees: Degrees,
    optimizer: OptimizerPlan | None,
    curriculum: CurriculumPlan | None,
    facts: ModelFacts | None,
    findings: Findings,
) -> None:
    """What cannot be cut, or does not go with sequences that are cut. Other lengths are checked batch by batch."""
    cp, sp = degrees.cp, degrees.sp
    if cp * sp == 1:
        return
    unit = length_unit(cp, sp)
    _check_length(config, unit, findings)
    _check_curriculum(curriculum, unit, findings)
    _check_heads(sp, degrees.tp, facts, findings)
    path = SP if sp > 1 else CP
    if optimizer is not None and optimizer.type in ONE_BIT:
        _refuse(path, f"{optimizer.type}, which averages momentum over ranks that see whole sequences", findings)


def _refuse(path: str, what: str, findings: Findings) -> None:
    findings.problem(
        path,
        f"sequences that are cut do not go with {what}",
        found=findings.config.sequence_parallel_size if path == SP else findings.config.parallel.context_parallel,
        allowed="1",
        repair="switch one of the two off",
    )


def _check_length(config: Config, unit: int, findings: Findings) -> None:
    length = config.data.sequence_length
    if config.model is None or length % unit == 0:
        return
    findings.problem(
        "data.sequence_length",
        f"{length} tokens cannot be cut into slices, {_ways(config)}: {length} = {length // unit} x {unit} + "
        f"{length % unit}",
        found=length,
        allowed=f"a multiple of {unit}",
        repair=f"set {_nearest_multiples(length, unit)}",
    )


def _check_curriculum(curriculum: CurriculumPlan | None, unit: int, findings: Findings) -> None:
    """Lengths of a schedule are those that its steps and ends give."""
    metric = curriculum.cutting if curriculum is not None else None
    if metric is None or metric.use != "truncate":
        return
    schedule, settings = metric.schedule, f"{metric.path}.schedule_config"
    lengths = {f"{metric.path}.min_difficulty": schedule.minimum, f"{metric.path}.max_difficulty": schedule.maximum}
    if schedule.type in ("fixed_linear", "fixed_root"):
        lengths[f"{settings}.difficulty_step"] = schedule.step_size
    if schedule.type == "fixed_discrete":
        lengths = {f"{settings}.difficulty": next((d for d in schedule.difficulties if d % unit), unit)}
    for path, number in lengths.items():
        if number % unit:
            findings.problem(
                path,
                f"sequences would be cut to lengths that are no multiple of {unit}, into which they are sliced "
                f"({_ways(findings.config)})",
                found=number,
                allowed=f"multiples of {unit}",
                repair=f"set {_nearest_multiples(int(number), unit)}",
            )


def _check_heads(sp: int, tp: int, facts: ModelFacts | None, findings: Findings) -> None:
    heads = facts.split_sizes.num_heads if facts is not None and facts.split_sizes is not None else None
    if wrong := heads_problem(heads, sp, tp):
        message, repair = wrong
        allowed = ", ".join(map(str, divisors((heads or 1) // tp)))
        findings.problem(SP, message, found=sp, allowed=allowed, repair=repair, code="ranks")


def heads_problem(heads: int | None, sp: int, tp: int) -> tuple[str, str] | None:
    """What is wrong, and the repair, where ``sp`` ranks cannot share the heads that tensor parallelism leaves to each.
    None for heads that are not known, and for those that ``tp`` does not divide, which is a problem of its own."""
    if heads is None or heads % tp or heads // tp % sp == 0:
        return None
    whole, heads = heads, heads // tp
    which = f"{heads} attention heads" if tp == 1 else f"{heads} attention heads (of {whole}) of a tp rank"
    nearest = sorted(sorted(divisors(heads), key=lambda number: abs(number - sp))[:2])
    return (
        f"{sp} ranks cannot share the {which}: {heads} = {heads // sp} x {sp} + {heads % sp}",
        f"set {' or '.join(map(str, nearest))}, or use {CP}, which takes any number of heads",
    )


def _ways(config: Config) -> str:
    given = {SP: config.sequence_parallel_size, CP: config.parallel.context_parallel}
    chunks = ", in two chunks a rank" if config.parallel.context_parallel > 1 else ""
    return " x ".join(f"{path} {size}" for path, size in given.items() if size > 1) + chunks


def _nearest_multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
