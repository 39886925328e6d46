"""Activations of one rank: what a micro-batch keeps (measured), divided by the axes that cut it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.built import checkpoints_activations
from engine.plan.facts import ForwardFacts, Kept, ModelFacts
from engine.plan.pipeline_schedules import activations_held
from engine.plan.plan import Plan
from engine.plan.stages import Stages, stages_of


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes at the moment when most is kept.

    ``kept``: by eager PyTorch on the CPU. ``low``: by an accelerator's kernels, whose dropout masks take one byte and
    whose attention keeps no matrix of queries x keys. ``high``: with what forward and backward hold beyond it while an
    operation runs.
    """

    low: int
    kept: int
    high: int
    micro_batches: int
    """Kept at once under a pipeline, counted for each of the rank's parts that they passed."""
    checkpointed: bool
    """Blocks keep their input alone and compute the rest again."""


def count_activations(plan: Plan, facts: ModelFacts, pipeline_rank: int = 0) -> ActivationBytes | None:
    """None where the model was not measured."""
    forward = facts.forward
    if forward is None:
        return None
    stages = stages_of(plan, facts)
    here = stages.on(pipeline_rank)
    held = micro_batches_held(plan, pipeline_rank)
    checkpointed = checkpoints(plan, facts)
    kept = low = 0
    for stage, number in zip(here, held, strict=True):
        kept += number * _of_stage(plan, forward, stages, stage, checkpointed, spare=False)
        low += number * _of_stage(plan, forward, stages, stage, checkpointed, spare=True)
    blocks = [forward.blocks[at] for run in stages.runs(pipeline_rank) for at in run]
    largest = max((_local(plan, block) for block in blocks), default=0)
    again = largest if checkpointed else 0
    working = forward.working_bytes // _ways(plan) if stages.last in here else largest
    scale = samples_at_once(plan) / forward.samples
    return ActivationBytes(
        low=round(scale * (low + again)),
        kept=round(scale * (kept + again)),
        high=round(scale * (kept + again + working)),
        micro_batches=sum(held),
        checkpointed=checkpointed,
    )


def micro_batches_held(plan: Plan, pipeline_rank: int) -> tuple[int, ...]:
    """At most, for each part of the model on a rank."""
    pipeline = plan.pipeline
    if pipeline is None:
        return (1,)
    return activations_held(
        pipeline.schedule, plan.degrees.pp, pipeline.num_micro_batches, pipeline_rank, pipeline.virtual_stages
    )


def samples_at_once(plan: Plan) -> float:
    """Of a micro-batch as it passes through the model: a pipeline may cut the loader's further."""
    if plan.pipeline is None:
        return plan.batch.micro_batch_size
    return plan.batch.micro_batch_size * plan.batch.accumulation_steps / plan.pipeline.num_micro_batches


def bytes_of_stage(plan: Plan, facts: ModelFacts, stage: int) -> int | None:
    """What a pipeline stage keeps of one micro-batch; None where the model was not measured."""
    if facts.forward is None:
        return None
    kept = _of_stage(plan, facts.forward, stages_of(plan, facts), stage, checkpoints(plan, facts), spare=False)
    return round(kept * samples_at_once(plan) / facts.forward.samples)


def _of_stage(plan: Plan, forward: ForwardFacts, stages: Stages, stage: int, checkpointed: bool, spare: bool) -> int:
    """What one micro-batch keeps in a stage. What the next stage gets stays here, too, until its gradients return."""
    layers = stages.layers_of(stage)
    kept = _local(plan, forward.before, spare) if stage == 0 else 0
    kept += _local(plan, forward.after, spare) if stage == stages.last else 0
    if checkpointed:
        kept += len(layers) * _entering_bytes(plan, forward)
    else:
        kept += sum(_local(plan, forward.blocks[at], spare) for at in layers)
    if stage < stages.last and forward.boundaries:
        kept += forward.boundaries[layers[-1]].spare_bytes // (plan.degrees.cp * plan.degrees.sp)
    return kept


def checkpoints(plan: Plan, facts: ModelFacts) -> bool:
    """Whether blocks are computed a second time in backward."""
    return checkpoints_activations(plan.config) and bool(facts.blocks)


def _ways(plan: Plan) -> int:
    return plan.degrees.cp * plan.degrees.sp * plan.degrees.tp


def _local(plan: Plan, kept: Kept, spare: bool = False) -> int:
    """One rank's part: sequences are sliced over cp and sp, and tp cuts what its layers have between them."""
    tp, slices = plan.degrees.tp, plan.degrees.cp * plan.degrees.sp
    whole = kept.whole_bytes + kept.cut_bytes // tp
    if not spare:
        return whole // slices
    share = kept.mask_bytes / max(kept.total_bytes, 1)
    return round((1 - share) * whole / slices)


def _entering_bytes(plan: Plan, forward: ForwardFacts) -> int:
    """What a checkpointed block keeps on the device."""
    settings = plan.config.activation_checkpointing
    if settings is not None and settings.cpu_checkpointing:
        return 0
    partitioned = settings is not None and settings.partition_activations
    return forward.entering_bytes // (_ways(plan) if partitioned else plan.degrees.cp * plan.degrees.sp)
