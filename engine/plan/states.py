"""Bytes of model states on one rank, tensor by tensor: exact where the model's tensors are known one by one.

What stays between steps is counted as the engine lays it out, padding and the optimizer's step counters included;
``temporary_bytes`` is what comes on top at the worst moment of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.plan.estimates import num_moments
from engine.plan.facts import ITEM_BYTES, ModelFacts
from engine.plan.plan import Plan
from engine.plan.units import Layout, compute_dtype, layout, master_dtype, shard_rows

BUCKETS_IN_FLIGHT = 3
"""Two reductions under way while a third bucket fills (engine/model/zero/buckets.py)."""

SCALARS = {"SGD": 0, "Lion": 0, "Muon": 0, "NAdam": 2, "ASGD": 3}
"""fp32 numbers that an optimizer keeps per tensor, where it is not one, the step."""

EXACT_OPTIMIZERS = frozenset(
    ("AdamW", "Adam", "RAdam", "NAdam", "Adamax", "Adadelta", "Rprop", "Adagrad", "RMSprop", "Lion", "SGD", "ASGD", "Lamb")
)  # fmt: skip
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


def count_states(plan: Plan, facts: ModelFacts, stage: int = 0) -> StateBytes:
    """The fullest rank of a pipeline stage. Without the model's tensors one by one, as if it were cut without padding."""
    return max(states_by_rank(plan, facts, stage), key=lambda s: (s.model_states or 0, s.parameters))


def states_by_rank(plan: Plan, facts: ModelFacts, stage: int = 0) -> list[StateBytes]:
    """One entry a rank of the shard axis, in order; their buffers and temporaries are alike."""
    cut = layout(plan, facts, stage)
    ranks = plan.degrees.dp_shard
    parameters, masters, gradients, elements, tensors = ([0] * ranks for _ in range(5))
    keeps_whole = plan.zero.stage < 2 or ranks == 1
    for bucket in cut.buckets:
        item, accumulated = ITEM_BYTES.get(bucket.values_dtype, 4), ITEM_BYTES.get(bucket.gradient_dtype, 4)
        master = master_dtype(bucket.values_dtype)
        whole_gradients = keeps_whole or bool(cut.units)  # 0-dim parameters beside a sharded model: as at stage 1
        for rank in range(ranks):
            own = bucket.own(rank)
            parameters[rank] += bucket.numel * item
            masters[rank] += 0 if master == bucket.values_dtype else own * ITEM_BYTES[master]
            gradients[rank] += (bucket.numel if whole_gradients else own) * accumulated
        for rank, _, numel in bucket.pieces():
            elements[rank] += numel * ITEM_BYTES[master]
            tensors[rank] += 1
    for unit in cut.units:
        shard = unit.shard_numel(ranks)
        trained = unit.shard_numel(ranks, trainable=True)
        item = max((ITEM_BYTES[master_dtype(p.dtype)] for p in unit.members), default=4)
        for rank in range(ranks):
            parameters[rank] += shard * item
            gradients[rank] += trained * item
        for parameter in unit.members:
            if parameter.trainable:
                for rank, numel in enumerate(shard_rows(parameter, ranks)):
                    elements[rank] += numel * item
                    tensors[rank] += numel > 0
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
            buffers=buffer_bytes(plan, facts),
            temporary=temporary,
            largest_temporary=why,
            is_exact=is_exact,
        )
        for rank in range(ranks)
    ]


def buffer_bytes(plan: Plan, facts: ModelFacts) -> int:
    """Every rank's; floating ones in the dtype that the config asks for."""
    wanted = plan.precision.buffers
    return sum(b.numel * (ITEM_BYTES[wanted] if wanted and b.is_floating else b.item_bytes) for b in facts.buffers)


def _temporary(plan: Plan, cut: Layout) -> tuple[int, str]:
    """The largest of what is alive for a moment only, and what it is."""
    candidates = [*_gathered(plan, cut), *_reduced(plan, cut)]
    return max(candidates, default=(0, ""))


def _gathered(plan: Plan, cut: Layout) -> Iterable[tuple[int, str]]:
    """Stage 3 in backward: the root unit stays gathered, the next group is fetched while one is in use, and that one's
    gradients are whole before they are reduced."""
    if not cut.units:
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
    travels = plan.degrees.dp > 1
    if plan.zero.stage == 2 and plan.degrees.dp_shard > 1:
        count = sum(largest[:BUCKETS_IN_FLIGHT]) * ITEM_BYTES[accumulate]
        yield count, "gradient buckets while they fill and travel"
    if travels and reduce != accumulate:
        yield sum(largest[:2]) * ITEM_BYTES[reduce], f"gradient buckets in {reduce} on their way"
    copied = sum(b.largest_shard for b in cut.buckets if b.gradient_dtype != master_dtype(b.values_dtype))
    if copied:
        yield 4 * copied, "the gradients in fp32 for the optimizer"
