"""The pipeline in the plan: schedule, virtual stages, micro-batches, and what cannot go with a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.batch import ACCUMULATION, MICRO
from engine.plan.findings import divisors, plural
from engine.plan.pipeline_schedules import V_SHAPED, bubble_fraction
from engine.plan.plan import BatchPlan, Degrees, PipelinePlan, ZeroPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

STAGES = "pipeline.stages"
VIRTUAL = "pipeline.virtual_stages"
MICRO_BATCHES = "pipeline.micro_batches"
PARTITION = "pipeline.partition"
SPLIT_FURTHER = {"sp": "sequence_parallel_size", "cp": "parallel.context_parallel"}
"""The axes that cannot split a stage here, and their keys."""


def resolve_pipeline(
    config: Config,
    degrees: Degrees,
    batch: BatchPlan | None,
    zero: ZeroPlan,
    findings: Findings,
) -> PipelinePlan | None:
    """None without a pipeline."""
    section = config.pipeline
    if degrees.pp == 1 or section is None:
        return None
    schedule = findings.resolved("pipeline.schedule", section.schedule)
    virtual = _virtual_stages(config, schedule, findings)
    partition: str | tuple[int, ...]
    if section.partition == "best":
        partition = findings.resolved(PARTITION, "parameters", "the heaviest stage sets the pace", "derived")
    elif isinstance(section.partition, str):
        partition = findings.resolved(PARTITION, section.partition)
        if partition == "time":
            findings.note(PARTITION, "layers are timed when training starts; ptrain plan takes their FLOPs for times")
    else:
        partition = findings.resolved(PARTITION, tuple(section.partition))
        _check_counts(partition, degrees.pp * virtual, findings)
    _check_company(config, degrees, zero, findings)
    if batch is None:
        return None
    num_micro_batches = _micro_batches(config, batch, findings)
    if num_micro_batches < degrees.pp * (2 if schedule in V_SHAPED else 1):
        bubble = bubble_fraction(schedule, degrees.pp, num_micro_batches, virtual)
        idle = f"idle {100 * bubble:.1f} % of a step" + (" at least" if schedule in V_SHAPED else "")
        count = "1 micro-batch" if num_micro_batches == 1 else f"{num_micro_batches} micro-batches"
        findings.note(
            MICRO_BATCHES,
            f"{count} cannot fill {plural(degrees.pp * virtual, 'stage')}: ranks are {idle}; {4 * degrees.pp} would be "
            f"a usual choice ({ACCUMULATION})",
        )
    return PipelinePlan(schedule, partition, num_micro_batches, virtual)


def _virtual_stages(config: Config, schedule: str, findings: Findings) -> int:
    assert config.pipeline is not None
    given = config.pipeline.virtual_stages
    if schedule in V_SHAPED:
        if given not in (None, 2):
            _refuse_virtual(schedule, given, "exactly 2: it goes down and comes back through the ranks", "2", findings)
        return findings.resolved(VIRTUAL, 2, f"{schedule} goes down and comes back through the ranks", "derived")
    if schedule == "interleaved_1f1b":
        if given is None or given < 2:
            _refuse_virtual(schedule, given or 1, "at least 2: with 1 it is 1f1b", "2 or more", findings)
            return 2
        return findings.resolved(VIRTUAL, given)
    if schedule in ("gpipe", "1f1b") and given not in (None, 1):
        _refuse_virtual(schedule, given, "1; interleaved_1f1b and zero_bubble use more", "1", findings)
        return 1
    return findings.resolved(VIRTUAL, given or 1)


def _refuse_virtual(schedule: str, found: int | None, needs: str, allowed: str, findings: Findings) -> None:
    findings.problem(
        VIRTUAL,
        f"pipeline.schedule {schedule} ({findings.source('pipeline.schedule')}) needs {needs}",
        found=found,
        allowed=allowed,
        repair=f"set pipeline.virtual_stages to {allowed.split()[0]}, or choose another schedule",
    )


def _check_counts(counts: tuple[int, ...], num_stages: int, findings: Findings) -> None:
    if len(counts) != num_stages:
        findings.problem(
            PARTITION,
            f"the list has {plural(len(counts), 'count')} and there are {plural(num_stages, 'stage')} "
            "(pipeline.stages x pipeline.virtual_stages)",
            found=list(counts),
            allowed=f"{num_stages} counts",
            repair="give one number of layers for each stage, in order",
        )


def _micro_batches(config: Config, batch: BatchPlan, findings: Findings) -> int:
    """Of the accumulation's micro-batches, each cut into equally many."""
    assert config.pipeline is not None
    wanted, steps, size = config.pipeline.micro_batches, batch.accumulation_steps, batch.micro_batch_size
    if wanted is None:
        return findings.resolved(MICRO_BATCHES, steps, "the micro-batches of gradient accumulation", "derived")
    allowed = [steps * pieces for pieces in divisors(size)]
    if wanted not in allowed:
        findings.problem(
            MICRO_BATCHES,
            f"{wanted} micro-batches cannot be cut from {plural(steps, 'accumulation step')} of "
            f"{plural(size, 'sample')}: each of those is cut into equally many pieces",
            found=wanted,
            allowed=", ".join(map(str, allowed)),
            repair=f"set pipeline.micro_batches to {min(allowed, key=lambda n: (abs(n - wanted), n))}, or change "
            f"{ACCUMULATION} or {MICRO}",
            code="batch-arithmetic",
        )
    return findings.resolved(MICRO_BATCHES, wanted)


def _check_company(config: Config, degrees: Degrees, zero: ZeroPlan, findings: Findings) -> None:
    """What does not go with a pipeline here, by name; and what means something else inside one."""

    def refuse(path: str, why: str, found: object, repair: str) -> None:
        message = f"does not go with pipeline.stages {degrees.pp} ({findings.source(STAGES)}): {why}"
        findings.problem(path, message, found=found, repair=repair, code="not-built", options=("leave it out",))

    for axis, path in SPLIT_FURTHER.items():
        degree = getattr(degrees, axis)
        if degree > 1:
            refuse(
                path, "stages that are split further are not built here", degree, "set it to 1, or drop the pipeline"
            )
    on_shards = "sequence"
    if degrees.tp > 1 and config.tensor_parallel is not None and on_shards in config.tensor_parallel.plan.values():
        why = "a norm on shards of the sequence hands shards to the next block, and hidden states travel whole"
        refuse("tensor_parallel.plan", why, on_shards, 'say "replicate" of the norms')
    if not config.managed_gradient_accumulation:
        refuse("managed_gradient_accumulation", "a pipeline runs whole windows", False, "set it to true")
    if isinstance(zero.reshard_after_forward, int) and not isinstance(zero.reshard_after_forward, bool):
        path = "zero_optimization.zero_hpz_partition_size"
        refuse(path, "blocks stay whole inside the window anyway", zero.reshard_after_forward, "set it to 1")
    if zero.stage >= 2 and degrees.dp_shard > 1:
        what = "gradients stay" if zero.stage == 2 else "the blocks of a stage and their gradients stay"
        findings.note(
            "zero_optimization.stage",
            f"under a pipeline {what} whole on a rank inside the accumulation window and are reduced once per step: "
            "memory there is that of stage 1" + (" plus the gathered parameters" if zero.stage == 3 else ""),
        )
