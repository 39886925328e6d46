"""`plan(config, world, facts=None) -> Plan`: every size resolved, every rule checked, all problems at once."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from engine.config.messages import ConfigError, Problem
from engine.plan.batch import ADD_BATCH, MICRO, NO_BATCH, resolve_batch
from engine.plan.curriculum import resolve_curriculum
from engine.plan.facts import ModelFacts
from engine.plan.findings import Findings
from engine.plan.ineffective import note_ineffective
from engine.plan.layer_drop import resolve_layer_drop
from engine.plan.one_bit import resolve_one_bit
from engine.plan.optimizer import resolve_optimizer
from engine.plan.pipeline import resolve_pipeline
from engine.plan.plan import Plan, World
from engine.plan.precision import resolve_precision
from engine.plan.reads import Rules
from engine.plan.rules import (
    check_autos,
    check_combinations,
    check_device,
    check_local_ranks,
    check_not_built,
    note_facts,
    note_profile_step,
    note_vocabulary,
    resolve_clipping,
)
from engine.plan.schedule import resolve_schedule
from engine.plan.sequence_parallel import check_slices
from engine.plan.smp import check_smp
from engine.plan.tensor_parallel import check_pairs, check_tensor_parallel
from engine.plan.token_drop import resolve_token_drop
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
    config = findings.config
    autos = sorted(config.spelled(path) for path in findings.needs_values if path in config.autos)
    if autos:
        file, line, column = config.locate(autos[0])
        message = f'needs a value here in place of "auto": {", ".join(autos)}'
        repair = "write a value, or pass it with --set PATH=VALUE or initialize(auto={...})"
        options = ("a value of its own",)
        problems.append(Problem(autos[0], message, NEEDS_VALUES, file, line, column, "auto", "", repair, options))
    if any(path not in config.autos for path in findings.needs_values):
        options = ("an integer >= 1",)
        problems.append(Problem(MICRO, NO_BATCH, NEEDS_VALUES, config.source, repair=ADD_BATCH, options=options))
    return problems


def examine(
    config: Config, world: World, facts: ModelFacts | None = None, unclear: Collection[str] = ()
) -> tuple[Plan | None, Findings]:
    """The plan, or None where a problem prevents one, and all that was found on the way; see `sketch`."""
    result, findings = sketch(config, world, facts, unclear)
    return (None if unclear or findings.problems or findings.needs_values else result), findings


def sketch(
    config: Config, world: World, facts: ModelFacts | None = None, unclear: Collection[str] = ()
) -> tuple[Plan | None, Findings]:
    """The plan as far as it goes: None only without a batch. With problems it is for explanations, not for a run.

    ``unclear``: paths whose value in the config stands in for one that cannot be used; no problem is reported that
    rests on them.
    """
    whole = config
    findings = Findings(config)
    rules = Rules(config, findings, unclear)
    config, run = rules.config, rules.run
    run(check_device, config, world, findings)
    run(check_local_ranks, world, findings)
    run(check_not_built, config, findings)
    degrees = run(resolve_degrees, config, world, findings)
    batch = run(resolve_batch, config, world, degrees, findings)
    precision = run(resolve_precision, config, findings)
    zero = run(resolve_zero, config, degrees, findings)
    clipping = run(resolve_clipping, config, findings)
    optimizer = run(resolve_optimizer, config, findings)
    zero = run(resolve_one_bit, config, optimizer, degrees, zero, findings)
    schedule = run(resolve_schedule, config, optimizer, findings)
    curriculum = run(resolve_curriculum, config, findings)
    layer_drop = run(resolve_layer_drop, config, findings)
    token_drop = run(resolve_token_drop, config, degrees, facts, findings)
    run(check_slices, config, degrees, optimizer, curriculum, facts, findings)
    pipeline = run(resolve_pipeline, config, degrees, batch, zero, findings)
    run(check_combinations, config, findings)
    run(check_smp, config, degrees, findings)
    run(check_autos, config, findings)
    seed = findings.resolved("seed", config.seed)
    run(note_ineffective, config, findings)
    run(note_vocabulary, config, findings)
    run(note_profile_step, config, findings)
    run(note_facts, config, degrees, facts, findings)
    run(check_tensor_parallel, config, degrees, facts, findings)
    run(check_pairs, config, degrees, optimizer, findings)
    if batch is None:
        return None, findings
    result = Plan(
        config=whole,
        world=world,
        degrees=degrees,
        batch=batch,
        precision=precision,
        zero=zero,
        gradient_clipping=clipping,
        optimizer=optimizer,
        schedule=schedule,
        seed=seed,
        curriculum=curriculum,
        layer_drop=layer_drop,
        token_drop=token_drop,
        pipeline=pipeline,
        values=tuple(findings.values),
        notes=(*whole.notes, *findings.notes),
        facts=facts,
    )
    return result, findings
