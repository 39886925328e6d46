"""Activations of one rank: what a micro-batch keeps (measured), divided by the axes that cut it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.built import checkpoints_activations
from engine.plan.facts import ForwardFacts, Kept, ModelFacts
from engine.plan.plan import Plan
from engine.plan.units import stage_blocks


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
    """Kept at once: more than one in the earlier stages of a pipeline."""
    checkpointed: bool
    """Blocks keep their input alone and compute the rest again."""


def count_activations(plan: Plan, facts: ModelFacts, stage: int = 0) -> ActivationBytes | None:
    """None where the model was not measured."""
    forward = facts.forward
    if forward is None:
        return None
    blocks = [forward.blocks[index] for index in stage_blocks(plan, facts, stage)]
    is_first, is_last = stage == 0, stage == plan.degrees.pp - 1
    ends = (forward.before if is_first else Kept()) + (forward.after if is_last else Kept())
    checkpointed = checkpoints(plan, facts)
    held = min(plan.degrees.pp - stage, plan.batch.accumulation_steps)
    kept, low = _local(plan, ends), _local(plan, ends, spare=True)
    if checkpointed:
        stored = len(blocks) * _entering_bytes(plan, forward)
        kept, low = kept + stored, low + stored
    else:
        kept += sum(_local(plan, block) for block in blocks)
        low += sum(_local(plan, block, spare=True) for block in blocks)
    largest = max((_local(plan, block) for block in blocks), default=0)
    again = largest if checkpointed else 0
    working = forward.working_bytes // _ways(plan) if is_last else largest
    scale = plan.batch.micro_batch_size / forward.samples
    return ActivationBytes(
        low=round(scale * (held * low + again)),
        kept=round(scale * (held * kept + again)),
        high=round(scale * (held * kept + again + working)),
        micro_batches=held,
        checkpointed=checkpointed,
    )


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
