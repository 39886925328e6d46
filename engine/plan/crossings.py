"""Collectives of the axes that cut a micro-batch: tensor, sequence, context and pipeline parallelism. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.activations import checkpoints, samples_at_once
from engine.plan.facts import Crossings, ForwardFacts, ModelFacts
from engine.plan.plan import Plan
from engine.plan.stages import Stages, stages_of

Call = tuple[str, str, str, int, int]
"""Axis, operation, purpose, calls, bytes that one of them sends."""

LOSS_BYTES = 4


def cross_axes(plan: Plan, facts: ModelFacts, pipeline_rank: int) -> Iterator[Call]:
    """Of a pipeline rank, over all micro-batches of a step; nothing where the model was not measured."""
    forward = facts.forward
    if forward is None or plan.degrees.model == 1:
        return
    stages = stages_of(plan, facts)
    is_first, is_last = (end in stages.on(pipeline_rank) for end in (0, stages.last))
    parts = [forward.crossings[1 + index] for run in stages.runs(pipeline_rank) for index in run]
    again = sum(parts, Crossings()) if checkpoints(plan, facts) else Crossings()
    parts += [forward.crossings[0]] if is_first else []
    parts += [forward.crossings[-1]] if is_last else []
    yield from _tensor(plan, sum(parts, Crossings()), again, forward, is_last)
    yield from _slices(plan, sum(parts, Crossings()), again, forward, is_last)
    yield from _stages(plan, stages, pipeline_rank)


def _times(plan: Plan) -> int:
    if plan.pipeline is not None:
        return plan.pipeline.num_micro_batches
    return plan.batch.accumulation_steps if plan.batch.managed else 1


def _scaled(plan: Plan, forward: ForwardFacts, size: int, calls: int) -> int:
    """Bytes of one call's whole tensor on this rank: of its samples and of its slice of the sequence."""
    slices = plan.degrees.cp * plan.degrees.sp
    return round(size * samples_at_once(plan)) // (forward.samples * max(calls, 1) * slices)


def _tensor(plan: Plan, whole: Crossings, again: Crossings, forward: ForwardFacts, is_last: bool) -> Iterator[Call]:
    """Forward sums what closes a pair of layers, backward the gradients of what opens one (Megatron-LM, arXiv
    1909.08053); the loss over a cut vocabulary needs three numbers a token from every rank."""
    tp = plan.degrees.tp
    if tp == 1:
        return
    times = _times(plan)
    for part, purpose in ((whole, "activations"), (again, "recomputed activations")):
        size = _scaled(plan, forward, part.closing_bytes, part.closing_calls)
        yield "tp", "all_reduce", purpose, times * part.closing_calls, 2 * (tp - 1) * size // tp
    size = _scaled(plan, forward, whole.opening_bytes, whole.opening_calls)
    yield "tp", "all_reduce", "gradients of activations", times * whole.opening_calls, 2 * (tp - 1) * size // tp
    if is_last and forward.cuts_logits:
        slices = plan.degrees.cp * plan.degrees.sp
        tokens = round(samples_at_once(plan) * forward.sequence_length) // slices
        yield "tp", "all_gather", "loss", times, 3 * 4 * tokens * (tp - 1)


def _slices(plan: Plan, whole: Crossings, again: Crossings, forward: ForwardFacts, is_last: bool) -> Iterator[Call]:
    """Ulysses sends heads to and fro (arXiv 2309.14509), the ring keys, values and their gradients around it (arXiv
    2310.01889); the loss of a sequence is the sum over its slices."""
    tp, sp, cp = plan.degrees.tp, plan.degrees.sp, plan.degrees.cp
    times, calls = _times(plan), whole.attention_calls
    for part, passes, purpose in ((whole, 2, "heads"), (again, 1, "recomputed heads")):
        if sp > 1:
            for size in (part.query_key_value_bytes, part.output_bytes):
                sent = _scaled(plan, forward, size, part.attention_calls) // tp * (sp - 1) // sp
                yield "sp", "all_to_all", purpose, times * passes * part.attention_calls, sent
    if cp > 1:
        around = times * (cp - 1)
        size = _scaled(plan, forward, whole.key_value_bytes, calls) // tp
        yield "cp", "send", "keys and values", 2 * around * calls + around * again.attention_calls, size
        sums = 4 * _scaled(plan, forward, whole.key_value_elements, calls) // tp
        yield "cp", "send", "gradients of keys and values", times * cp * calls, sums
    for axis, degree in (("cp", cp), ("sp", sp)):
        if degree > 1 and is_last:
            yield axis, "all_reduce", "loss", times, 2 * (degree - 1) * LOSS_BYTES // degree


def _stages(plan: Plan, stages: Stages, pipeline_rank: int) -> Iterator[Call]:
    """What the last layer of a stage returns, to the next; the gradients of what came in, to the one before."""
    pipeline, forward = plan.pipeline, stages.facts.forward
    assert forward is not None
    if pipeline is None:
        return

    def sent(stage: int, of: int, back: bool) -> Iterator[Call]:
        """Over the cut behind stage ``of``, from ``stage``."""
        boundary = forward.boundaries[stages.layers_of(of)[-1]]
        purpose = "gradients of activations" if back else "activations"
        number = boundary.gradients if back else boundary.tensors
        size = boundary.gradient_bytes if back else boundary.tensor_bytes
        if number and stages.rank_of(of) != stages.rank_of(of + 1):
            yield "pp", "send", purpose, _times(plan) * number, _scaled(plan, forward, size, number)

    for stage in stages.on(pipeline_rank):
        if stage < stages.last:
            yield from sent(stage, stage, back=False)
        if stage > 0:
            yield from sent(stage, stage - 1, back=True)
