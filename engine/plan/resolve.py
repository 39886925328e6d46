"""`plan(config, world, facts=None) -> Plan`: every size resolved, every rule checked, all problems at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config.messages import ConfigError, Problem
from engine.plan.batch import resolve_batch
from engine.plan.facts import ModelFacts
from engine.plan.findings import Findings
from engine.plan.ineffective import note_ineffective
from engine.plan.one_bit import resolve_one_bit
from engine.plan.optimizer import resolve_optimizer
from engine.plan.plan import Plan, World
from engine.plan.precision import resolve_precision
from engine.plan.rules import (
    check_autos,
    check_device,
    check_local_ranks,
    check_not_built,
    note_facts,
    note_vocabulary,
    resolve_clipping,
)
from engine.plan.schedule import resolve_schedule
from engine.plan.world import resolve_degrees
from engine.plan.zero import resolve_zero

if TYPE_CHECKING:
    from engine.config import Config

NEEDS_VALUES = "needs-values"
NOT_BUILT = "not-built"


def plan(config: Config, world: World | None = None, facts: ModelFacts | None = None) -> Plan:
    """What ``config`` means for ``world`` (one CPU process by default). Pure: the same arguments, the same plan.

    ``facts`` are the model's, where it is known; rules that need them are left out without.

    Raises: ConfigError with every problem found; those that only need a value or a feature have the code
    ``needs-values`` or ``not-built``.
    """
    result, findings = examine(config, world or World(), facts)
    problems = all_problems(findings)
    if problems:
        raise ConfigError(problems)
    assert result is not None
    return result


def all_problems(findings: Findings) -> list[Problem]:
    """The problems, with one more for all the values that are still "auto"."""
    problems = list(findings.problems)
    if findings.needs_values:
        first, *_ = sorted(findings.needs_values)
        file, line, column = findings.config.locate(first)
        message = f'needs a value here in place of "auto": {", ".join(findings.needs_values)}'
        repair = "write a value, or pass it with --set PATH=VALUE or initialize(auto={...})"
        options = ("a value of its own",)
        problems.append(Problem(first, message, NEEDS_VALUES, file, line, column, "auto", "", repair, options))
    return problems


def examine(config: Config, world: World, facts: ModelFacts | None = None) -> tuple[Plan | None, Findings]:
    """The plan, or None where a problem prevents one, and all that was found on the way."""
    result, findings = sketch(config, world, facts)
    return (None if findings.problems or findings.needs_values else result), findings


def sketch(config: Config, world: World, facts: ModelFacts | None = None) -> tuple[Plan | None, Findings]:
    """The plan as far as it goes: None only without a batch. With problems it is for explanations, not for a run."""
    findings = Findings(config)
    check_device(config, world, findings)
    check_local_ranks(world, findings)
    check_not_built(config, findings)
    degrees = resolve_degrees(config, world, findings)
    batch = resolve_batch(config, world, degrees, findings)
    precision = resolve_precision(config, findings)
    zero = resolve_zero(config, degrees, findings)
    clipping = resolve_clipping(config, findings)
    optimizer = resolve_optimizer(config, findings)
    zero = resolve_one_bit(config, optimizer, degrees, zero, findings)
    schedule = resolve_schedule(config, optimizer, findings)
    check_autos(config, findings)
    seed = findings.resolved("seed", config.seed)
    note_ineffective(config, findings)
    note_vocabulary(config, findings)
    note_facts(config, degrees, facts, findings)
    if batch is None:
        return None, findings
    result = Plan(
        config=config,
        world=world,
        degrees=degrees,
        batch=batch,
        precision=precision,
        zero=zero,
        gradient_clipping=clipping,
        optimizer=optimizer,
        schedule=schedule,
        seed=seed,
        values=tuple(findings.values),
        notes=(*config.notes, *findings.notes),
        facts=facts,
    )
    return result, findings
