"""Bytes of model states on one rank, tensor by tensor: exact where the model's tensors are known one by one.

What stays between steps is counted as the engine lays it out, padding and the optimizer's step counters included;
``temporary_bytes`` is what comes on top at the worst moment of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.plan.cuts import row_range
from engine.plan.estimates import num_moments
from engine.plan.facts import ITEM_BYTES, ModelFacts
from engine.plan.plan import Plan
from engine.plan.stages import stages_of
from engine.plan.units import Layout, compute_dtype, keeps_whole_gradients, layout, master_dtype

BUCKETS_IN_FLIGHT = 3
"""Two reductions under way while a third bucket fills (engine/model/zero/buckets.py)."""

SCALARS = {"SGD": 0, "Lion": 0, "Muon": 0, "NAdam": 2, "ASGD": 3}
"""fp32 numbers that an optimizer keeps per tensor, where it is not one, the step."""

EXACT_OPTIMIZERS = frozenset(
    ("AdamW", "Adam", "RAdam", "NAdam", "Adamax", "Adadelta", "Rprop", "Adagrad", "RMSprop", "Lion", "SGD", "ASGD")
) | {"Lamb"}
"""Those whose state is so many numbers per element and per tensor; the others' bytes are estimates."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. ``optimizer``: None for one that is not known here."""

    parameters: int
    masters: int
    gradients: int
    optimizer: int | None
    buffers: int
    temporary: int
    largest_temporary: str = ""
    """What ``temporary`` is made of, as a clause."""
    is_exact: bool = True
    """Of all but ``temporary``."""

    @property
    def model_states(self) -> int | None:
        """Parameters, masters, gradients and optimizer state: what the ZeRO paper counts."""
        if self.optimizer is None:
            return None
        return self.parameters + self.masters + self.gradients + self.optimizer


def count_states(plan: Plan, facts: ModelFacts, pipeline_rank: int = 0) -> StateBytes:
    """The first rank of those that hold a pipeline rank's part of the model. The others hold as much but for padding
    and for a step counter (4 bytes) for each tensor that is cut elsewhere."""
    return states_by_rank(plan, facts, pipeline_rank, 1)[0]


def states_by_rank(plan: Plan, facts: ModelFacts, pipeline_rank: int = 0, ranks: int | None = None) -> list[StateBytes]:
    """One entry for each of the first ``ranks`` (None: all) among which ZeRO cuts what a pipeline rank holds."""
    cut = layout(plan, facts, pipeline_rank)
    shards = plan.shard_size
    ranks = shards if ranks is None else ranks
    parameters, masters, gradients, elements, tensors = ([0] * ranks for _ in range(5))
    whole_gradients = keeps_whole_gradients(plan) or bool(cut.units)  # 0-dim parameters at stage 3: as at stage 1
    for bucket in cut.buckets:
        item, accumulated = ITEM_BYTES.get(bucket.values_dtype, 4), ITEM_BYTES.get(bucket.gradient_dtype, 4)
        master = master_dtype(bucket.values_dtype)
        for rank in range(ranks):
            own = bucket.own(rank)
            parameters[rank] += bucket.numel * item
            masters[rank] += 0 if master == bucket.values_dtype else own * ITEM_BYTES[master]
            gradients[rank] += (bucket.numel if whole_gradients else own) * accumulated
        for rank, numel in bucket.pieces(ranks):
            elements[rank] += numel * ITEM_BYTES.get(master, 4)
            tensors[rank] += 1
    for unit in cut.units:
        shard, trained = unit.shard_numel(shards), unit.shard_numel(shards, trainable=True)
        item = max((ITEM_BYTES.get(master_dtype(p.dtype), 4) for p in unit.members), default=4)
        for rank in range(ranks):
            parameters[rank] += shard * item
            gradients[rank] += trained * item
        for parameter in unit.members:
            for rank in range(ranks if parameter.trainable else 0):
                start, stop = row_range(parameter.shape, rank, shards)
                elements[rank] += (stop - start) * item
                tensors[rank] += stop > start
    whole = sum(p.numel * ITEM_BYTES.get(compute_dtype(plan, p.dtype), 4) for p in cut.whole)
    moments = num_moments(plan.optimizer)
    scalars = 4 * SCALARS.get(plan.optimizer.type, 1) if plan.optimizer is not None else 0
    is_exact = bool(facts.parameters) and plan.optimizer is not None and plan.optimizer.type in EXACT_OPTIMIZERS
    temporary, why = _temporary(plan, cut)
    return [
        StateBytes(
            parameters=parameters[rank] + whole,
            masters=masters[rank],
            gradients=gradients[rank],
            optimizer=None if moments is None else moments * elements[rank] + scalars * tensors[rank],
            buffers=buffer_bytes(plan, facts, pipeline_rank),
            temporary=temporary,
            largest_temporary=why,
            is_exact=is_exact,
        )
        for rank in range(ranks)
    ]


def buffer_bytes(plan: Plan, facts: ModelFacts, pipeline_rank: int = 0) -> int:
    """Floating ones in the dtype that the config asks for."""
    wanted, here = plan.precision.buffers, stages_of(plan, facts).buffers_on(pipeline_rank)
    return sum(b.numel * (ITEM_BYTES[wanted] if wanted and b.is_floating else b.item_bytes) for b in here)


def _temporary(plan: Plan, cut: Layout) -> tuple[int, str]:
    """The largest of what is alive for a moment only, and what it is."""
    candidates = [*_gathered(plan, cut), *_reduced(plan, cut)]
    return max(candidates, default=(0, ""))


def _gathered(plan: Plan, cut: Layout) -> Iterable[tuple[int, str]]:
    """Stage 3 in backward: the root unit stays gathered, the next group is fetched while one is in use, and that one's
    gradients are whole before they are reduced. Under a pipeline all is whole until the window ends."""
    if not cut.units:
        return
    if plan.degrees.pp > 1:
        whole = sum(unit.numel for unit in cut.units)
        item = ITEM_BYTES[compute_dtype(plan, cut.units[0].members[0].dtype)]
        yield whole * (item + ITEM_BYTES[plan.precision.reduce]), "the stage's parameters and gradients, whole"
        return
    sizes = [unit.numel for unit in cut.units if unit.again]
    stay = [unit.numel for unit in cut.units if not unit.again]
    largest = max(sizes, default=max(stay, default=0))
    compute = ITEM_BYTES[compute_dtype(plan, cut.units[0].members[0].dtype)]
    gathered = compute * (sum(stay) + 2 * max(sizes, default=0))
    gradients = largest * (compute + ITEM_BYTES[plan.precision.reduce])
    yield gathered + gradients, "gathered groups of blocks, and the gradients of one before they are reduced"


def _reduced(plan: Plan, cut: Layout) -> Iterable[tuple[int, str]]:
    """Stages 0 to 2: buckets that fill or travel, copies in the dtype of the wire, gradients in the masters' dtype."""
    if not cut.buckets:
        return
    largest = sorted((bucket.numel for bucket in cut.buckets), reverse=True)
    accumulate, reduce = plan.precision.accumulate, plan.precision.reduce
    travels = plan.degrees.dp * plan.degrees.cp * plan.degrees.sp > 1
    if not keeps_whole_gradients(plan):
        count = sum(largest[:BUCKETS_IN_FLIGHT]) * ITEM_BYTES[accumulate]
        yield count, "gradient buckets while they fill and travel"
    if travels and reduce != accumulate:
        yield sum(largest[:2]) * ITEM_BYTES[reduce], f"gradient buckets in {reduce} on their way"
    copied = sum(b.largest_shard for b in cut.buckets if b.gradient_dtype != master_dtype(b.values_dtype))
    if copied:
        yield 4 * copied, "the gradients in fp32 for the optimizer"
