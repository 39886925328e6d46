"""What one rank holds of a model, in the pieces that travel together: buckets (stages 0 to 2) and units (stage 3).

The same cuts as building makes (engine/plan/cuts.py), on the names and shapes of the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.plan.cuts import assign_owners, chunk_rows, group_runs, is_cut, owner_bounds, padded, runs
from engine.plan.facts import ITEM_BYTES, ModelFacts, ParameterFacts
from engine.plan.plan import Plan
from engine.plan.stages import stages_of

WHOLE_MATRICES = ("Muon", "Adafactor")
"""Optimizers that step on whole parameters: each has an owner."""


def compute_dtype(plan: Plan, dtype: str) -> str:
    """What forward uses for a parameter of ``dtype``."""
    return plan.precision.compute if plan.precision.compute != "fp32" and dtype in ITEM_BYTES else dtype


def master_dtype(dtype: str) -> str:
    """fp32 for 16-bit parameters, else the parameter's own."""
    return "fp32" if dtype in ("bf16", "fp16") else dtype


@dataclass(frozen=True)
class FlatBucket:
    """Parameters in one flat buffer of ``bounds[-1]`` elements; rank r of the shard axis owns
    ``[bounds[r], bounds[r + 1])`` of it."""

    members: tuple[ParameterFacts, ...]
    bounds: tuple[int, ...]
    values_dtype: str
    gradient_dtype: str

    @property
    def numel(self) -> int:
        return self.bounds[-1]

    def own(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    @property
    def largest_shard(self) -> int:
        return max(after - before for before, after in pairwise(self.bounds))

    def pieces(self, ranks: int) -> Iterator[tuple[int, int]]:
        """(rank, elements) of every piece of a parameter that one of the first ``ranks`` owns."""
        rank, start = 0, 0
        for member in self.members:
            stop = start + member.numel
            while start < stop and self.bounds[rank + 1] <= start:
                rank += 1
            here = rank
            while here < ranks and self.bounds[here] < stop:
                numel = min(stop, self.bounds[here + 1]) - max(start, self.bounds[here])
                if numel > 0:
                    yield here, numel
                here += 1
            start = stop


@dataclass(frozen=True)
class Unit:
    """Parameters that stage 3 gathers together, padded to whole rows per rank. ``again``: gathered for backward too."""

    members: tuple[ParameterFacts, ...]
    again: bool

    @property
    def numel(self) -> int:
        return sum(member.numel for member in self.members)

    def shard_numel(self, ranks: int, trainable: bool = False) -> int:
        """Elements of one rank's part of the flat buffer that travels, padding included."""
        taken = [m for m in self.members if m.trainable or not trainable]
        return sum(chunk_rows(m.shape, ranks) * (m.numel // m.shape[0]) for m in taken)


@dataclass(frozen=True)
class Layout:
    """The parameters of one rank. At stage 3 on several ranks ``units`` holds what is cut and ``buckets`` the trained
    0-dim parameters; else all that is trained lies in buckets. ``whole``: untrained, on every rank."""

    buckets: tuple[FlatBucket, ...]
    units: tuple[Unit, ...]
    whole: tuple[ParameterFacts, ...]

    @property
    def parameters(self) -> tuple[ParameterFacts, ...]:
        buckets = (member for bucket in self.buckets for member in bucket.members)
        units = (member for unit in self.units for member in unit.members)
        return (*buckets, *units, *self.whole)


def keeps_whole_gradients(plan: Plan) -> bool:
    """Between the backward passes of a window: below stage 2, and under a pipeline, which reduces once a step."""
    return plan.zero.stage < 2 or plan.shard_size == 1 or plan.degrees.pp > 1


def local_parameters(plan: Plan, facts: ModelFacts, rank: int = 0) -> list[ParameterFacts]:
    """What a pipeline rank holds before ZeRO cuts it, in registration order, in local shapes."""
    tp, held = plan.degrees.tp, stages_of(plan, facts).held_by(rank)
    return [parameter if tp == 1 or parameter.cut is None else _cut(parameter, tp) for parameter in held]


def _cut(parameter: ParameterFacts, ranks: int) -> ParameterFacts:
    shape = list(parameter.shape)
    assert parameter.cut is not None
    shape[parameter.cut] = -(-shape[parameter.cut] // ranks)
    return replace(parameter, shape=tuple(shape))


def layout(plan: Plan, facts: ModelFacts, rank: int = 0) -> Layout:
    """How ZeRO cuts the parameters of a pipeline rank."""
    held = local_parameters(plan, facts, rank)
    if plan.zero.stage == 3 and plan.shard_size > 1:
        return _sharded(plan, facts, held, rank)
    trained = [p for p in held if p.trainable]
    return Layout(tuple(_buckets(plan, facts, trained)), (), tuple(p for p in held if not p.trainable))


def _buckets(
    plan: Plan, facts: ModelFacts, trained: Sequence[ParameterFacts], limit: int | None = None
) -> Iterator[FlatBucket]:
    ranks, stages = plan.shard_size, stages_of(plan, facts)
    holders = {p.name: held if len(held := stages.holders(p)) > 1 else () for p in trained}
    whole = plan.optimizer is not None and plan.optimizer.type in WHOLE_MATRICES
    owner_of = dict.fromkeys(holders, 0)
    for shared in sorted(set(holders.values())) if whole else ():
        together = [p for p in trained if holders[p.name] == shared]
        owners = assign_owners([p.numel for p in together], ranks)
        owner_of |= {p.name: owner for p, owner in zip(together, owners, strict=True)}
    ordered = list(reversed(trained))
    if limit is None:
        limit = sum(p.numel for p in trained) if plan.zero.whole_groups else plan.zero.bucket_elements
    ordered.sort(key=lambda p: (_copies(plan, p), holders[p.name]))
    kinds = [(p.numel, (p.dtype, _copies(plan, p), holders[p.name])) for p in ordered]
    for positions in runs(kinds, limit):
        members = [ordered[position] for position in positions]
        numels = [p.numel for p in members]
        if whole:
            members.sort(key=lambda p: owner_of[p.name])
            bounds = owner_bounds(numels, [owner_of[ordered[at].name] for at in positions], ranks)
        else:
            shard = padded(sum(numels), ranks) // ranks
            bounds = [shard * rank for rank in range(ranks + 1)]
        dtype = compute_dtype(plan, members[0].dtype)
        accumulate = plan.precision.accumulate if dtype in ("fp32", "bf16", "fp16") else dtype
        yield FlatBucket(tuple(members), tuple(bounds), dtype, accumulate)


def _copies(plan: Plan, parameter: ParameterFacts) -> int:
    """Ranks of the tensor-parallel group that hold the same: what they all hold lies in buckets of its own."""
    return plan.degrees.tp if parameter.cut is None else 1


def _sharded(plan: Plan, facts: ModelFacts, held: Sequence[ParameterFacts], rank: int) -> Layout:
    """Groups of consecutive blocks that share nothing with the rest, and the rest as one unit.

    Blocks are grouped by what they hold before tensor parallelism cuts them, and within a pipeline stage.
    """
    stages = stages_of(plan, facts)
    whole = {parameter.name: parameter.numel for parameter in facts.parameters}
    numels = [0] * len(facts.blocks)
    not_alone: set[int] = set()
    for parameter in held:
        if parameter.block is not None:
            numels[parameter.block] += whole[parameter.name]
            not_alone |= stages.blocks_of(parameter, rank) if parameter.shared else set()
    filled = {p.block for p in held}
    groups = []
    for run in stages.runs(rank):
        alone = [block for block in run if block in filled and block not in not_alone]
        cut = group_runs([numels[block] for block in alone], plan.zero.group_elements)
        groups += [[alone[at] for at in group] for group in cut]
    group_of = {block: index for index, group in enumerate(groups) for block in group}
    members: list[list[ParameterFacts]] = [[] for _ in groups]
    rest: list[ParameterFacts] = []
    for parameter in held:
        if is_cut(parameter.shape):
            group = group_of.get(parameter.block) if parameter.block is not None else None
            (rest if group is None else members[group]).append(parameter)
    again = bool(plan.zero.reshard_after_forward)
    units = [Unit(tuple(group), again) for group in members]
    if rest:
        units.append(Unit(tuple(rest), again=False))
    uncut = [p for p in held if not is_cut(p.shape)]
    scalars = [p for p in uncut if p.trainable and not p.shape]
    buckets = tuple(_buckets(plan, facts, scalars, limit=len(scalars)))
    return Layout(buckets, tuple(units), tuple(p for p in uncut if p not in scalars))
