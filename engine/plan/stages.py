"""Which layers, and with them which parameters, every pipeline rank holds: from the plan and the model's record alone.

Building asks the same functions (engine/model/pipeline/cut.py). Without a pipeline there is one stage, the whole model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from engine.config.messages import ConfigError, Problem
from engine.plan.facts import BufferFacts, ModelFacts, ParameterFacts
from engine.plan.findings import divisors, plural
from engine.plan.partition import Layer, cut
from engine.plan.pipeline_schedules import V_SHAPED, rank_of_stage, stages_of_rank
from engine.plan.plan import Plan

PARTITION, STAGES, VIRTUAL = "pipeline.partition", "pipeline.stages", "pipeline.virtual_stages"
ENDS = ("first", "last")


class Stages:
    """``bounds``: stage s holds the layers ``[bounds[s], bounds[s + 1])`` of ``facts.blocks``; there are pipeline ranks
    x virtual stages. Use `stages_of`.

    Raises EngineError, with the arithmetic and the nearest that fits, where the layers cannot be cut so.
    """

    def __init__(self, plan: Plan, facts: ModelFacts) -> None:
        self.plan, self.facts = plan, facts
        self._places = _places(facts)
        if plan.pipeline is None:
            self.bounds: tuple[int, ...] = (0, len(facts.blocks))
            return
        num_stages = plan.degrees.pp * plan.pipeline.virtual_stages
        if num_stages > len(facts.blocks):
            raise ConfigError([_too_many(plan, len(facts.blocks))])
        self.bounds = cut(plan.pipeline.partition, self.layers(), num_stages, *self.around(), times_of(facts))
        self._check()

    def _check(self) -> None:
        blocks, wrong = self.facts.blocks, dict(self.facts.uncuttable)
        fine = ", ".join(f"behind {blocks[end - 1]}" for end in range(1, len(blocks)) if end not in wrong)
        problems = [
            _problem(
                self.plan,
                f"the model cannot be cut between {blocks[end - 1]} and {blocks[end]}: what stands behind reads "
                f"{wrong[end]}, and only what the layer in front returns travels",
                "give the model as engine.PipelineModule, whose layers hand on tuples, or "
                + (f"cut it {fine} ({PARTITION})" if fine else "train it without a pipeline"),
            )
            for end in self.bounds[1:-1]
            if end in wrong
        ]
        if problems:
            raise ConfigError(problems[:1])

    @property
    def last(self) -> int:
        return len(self.bounds) - 2

    def layers(self) -> list[Layer]:
        """As the partition weighs them. A parameter that several layers share counts in each."""
        facts, held = self.facts, [0] * len(self.facts.blocks)
        for parameter in facts.parameters:
            for position in self._places[parameter.name][0] if parameter.trainable else ():
                held[position] += parameter.numel
        kinds = facts.layer_kinds or ("",) * len(held)
        return [Layer(*each) for each in zip(facts.blocks, kinds, held, strict=True)]

    def around(self) -> tuple[int, int]:
        """Trainable elements outside the layers that the first and that the last stage hold."""
        trained = [p for p in self.facts.parameters if p.trainable]
        first, last = (sum(p.numel for p in trained if end in self._places[p.name][1]) for end in ENDS)
        return first, last

    def on(self, rank: int) -> list[int]:
        """The stages on a pipeline rank, ascending."""
        plan = self.plan
        if plan.pipeline is None:
            return [0]
        return stages_of_rank(plan.pipeline.schedule, plan.degrees.pp, plan.pipeline.virtual_stages, rank)

    def rank_of(self, stage: int) -> int:
        plan = self.plan
        return 0 if plan.pipeline is None else rank_of_stage(plan.pipeline.schedule, plan.degrees.pp, stage)

    def layers_of(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def runs(self, rank: int) -> list[range]:
        """The layers of each stage on a pipeline rank."""
        return [self.layers_of(stage) for stage in self.on(rank)]

    def stages_with(self, parameter: ParameterFacts) -> set[int]:
        inside, outside = self._places[parameter.name]
        found = {s for at in inside for s, (a, b) in enumerate(pairwise(self.bounds)) if a <= at < b}
        return found | {0 if end == "first" else self.last for end in outside}

    def holders(self, parameter: ParameterFacts) -> tuple[int, ...]:
        """The pipeline ranks that hold a parameter."""
        return tuple(sorted({self.rank_of(stage) for stage in self.stages_with(parameter)}))

    def parameters_of(self, stage: int) -> int:
        """Elements that a stage holds, trainable or not."""
        return sum(p.numel for p in self.facts.parameters if stage in self.stages_with(p))

    def held_by(self, rank: int) -> list[ParameterFacts]:
        """What a pipeline rank holds, before anything else cuts it, in registration order.

        ``block`` and ``shared`` of each are those that it has on this rank, where other layers are gone.
        """
        if self.plan.pipeline is None:
            return list(self.facts.parameters)
        here = {at for run in self.runs(rank) for at in run}
        ends_here = {end for end, stage in zip(ENDS, (0, self.last), strict=True) if stage in self.on(rank)}
        found = []
        for parameter in self.facts.parameters:
            places = self._places[parameter.name]
            inside, outside = [at for at in places[0] if at in here], ends_here & set(places[1])
            if inside or outside:
                shared = bool(outside) or len(inside) > 1
                found.append(replace(parameter, block=inside[0] if inside else None, shared=shared))
        return found

    def blocks_of(self, parameter: ParameterFacts, rank: int) -> set[int]:
        """The layers of a rank in which a parameter has a name."""
        here = {at for run in self.runs(rank) for at in run}
        return here & set(self._places[parameter.name][0])

    def buffers_on(self, rank: int) -> list[BufferFacts]:
        """What is around the layers is on every rank."""
        here = {at for run in self.runs(rank) for at in run}
        places = [(buffer, _position_of(self.facts.blocks, buffer.name)) for buffer in self.facts.buffers]
        return [buffer for buffer, at in places if at is None or at in here]


def times_of(facts: ModelFacts) -> tuple[int, ...]:
    """Measured, else in FLOPs, of what is in front of the layers, of each, and of what is behind; () where unknown."""
    forward = facts.forward
    if facts.layer_times or forward is None or not sum(forward.block_flops):
        return facts.layer_times
    around = forward.before_flops + forward.after_flops
    backward = (forward.backward_flops - 2 * around) / sum(forward.block_flops)
    blocks = (round((1 + backward) * flops) for flops in forward.block_flops)
    return 3 * forward.before_flops, *blocks, 3 * forward.after_flops


def stages_of(plan: Plan, facts: ModelFacts) -> Stages:
    """Kept for the last few plans and models: working it out takes time, and many ask."""
    return _made(_Pair(plan, facts))


class _Pair:
    """Compared by identity: neither ever changes."""

    def __init__(self, plan: Plan, facts: ModelFacts) -> None:
        self.plan, self.facts = plan, facts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pair) and self.plan is other.plan and self.facts is other.facts

    def __hash__(self) -> int:
        return hash((id(self.plan), id(self.facts)))


@lru_cache(maxsize=4)
def _made(pair: _Pair) -> Stages:
    return Stages(pair.plan, pair.facts)


def _places(facts: ModelFacts) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """First name of a parameter -> the layers, and the ends, that hold it. Where the model is not known so well, a
    parameter around the layers stands in front of or behind them as it is registered, a tied one on both ends."""
    groups, known = {names[0]: names for names in facts.ties}, dict(facts.ends)
    last_in_layers = max((i for i, p in enumerate(facts.parameters) if p.block is not None), default=0)
    found = {}
    for index, parameter in enumerate(facts.parameters):
        names = groups.get(parameter.name, (parameter.name,))
        inside: dict[str, Any] = {name: _position_of(facts.blocks, name) for name in names}
        if not known and len(names) == 1:
            inside[parameter.name] = parameter.block
        outside = [name for name, position in inside.items() if position is None]
        by_order = "last" if index > last_in_layers else "first"
        if known:
            ends = {known.get(name, "both") for name in outside}
        else:
            ends = {"both" if len(names) > 1 else by_order} if outside else set()
        held = ENDS if "both" in ends else tuple(end for end in ENDS if end in ends)
        found[parameter.name] = tuple(sorted({at for at in inside.values() if at is not None})), held
    return found


def _position_of(layers: Collection[str], name: str) -> int | None:
    """The layer that the parameter or buffer ``name`` belongs to; None for what is around the layers."""
    return next((at for at, layer in enumerate(layers) if name.startswith(f"{layer}.")), None)


def _too_many(plan: Plan, num_layers: int) -> Problem:
    """More stages than layers: the arithmetic, and the numbers of stages that fit."""
    degrees, pipeline = plan.degrees, plan.pipeline
    assert pipeline is not None
    virtual = pipeline.virtual_stages
    needed = degrees.pp * virtual
    product = f" ({degrees.pp} ranks x {VIRTUAL} {virtual})" if virtual > 1 else ""
    could_be = [n for n in divisors(degrees.pp * degrees.dp) if n * virtual <= num_layers]
    repairs = [f"set {STAGES} to {could_be[-1]}"] if could_be and could_be[-1] > 1 else []
    fewer = [n for n in range(virtual - 1, 0, -1) if degrees.pp * n <= num_layers]
    if fewer and pipeline.schedule not in V_SHAPED:
        change = f"set {VIRTUAL} to {fewer[0]}" if fewer[0] > 1 else "take pipeline.schedule 1f1b, one stage a rank"
        repairs.append(change)
    return _problem(
        plan,
        f"{needed} stages{product} need {needed} layers, and the model has {plural(num_layers, 'layer')}",
        ", or ".join(repairs) or "train it without a pipeline",
        ", ".join(map(str, could_be)),
    )


def _problem(plan: Plan, message: str, repair: str, allowed: str = "") -> Problem:
    file, line, column = plan.config.locate(STAGES)
    return Problem(STAGES, message, "conflict", file, line, column, plan.degrees.pp, allowed, repair)
