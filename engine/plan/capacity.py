"""Does a step fit in a rank's memory, why not, and which near settings would: `judge`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from engine.config import Config, load_config
from engine.config.built import checkpoints_activations
from engine.config.messages import ConfigError
from engine.plan.batch import ACCUMULATION, MICRO, TOTAL
from engine.plan.facts import ModelFacts
from engine.plan.forecast import Forecast, forecast
from engine.plan.plan import Plan, World
from engine.plan.propose import USABLE
from engine.plan.resolve import NOT_BUILT, sketch
from engine.plan.world import imagined_world

MOST_RANKS = 64
"""Times the ranks of the plan: worlds beyond are not tried."""
MOST_OPTIONS = 3

Kind = Literal["fits", "may fit", "does not fit", "unknown"]


@dataclass(frozen=True)
class Option:
    """A setting near the plan that fits. ``changes``: by JSON path; ``ranks``: None for as many as planned."""

    changes: dict[str, Any]
    ranks: int | None
    high_bytes: int
    is_built: bool


@dataclass(frozen=True)
class Fit:
    """``usable_bytes`` of ``memory_bytes``: the rest is for the CUDA context, communication buffers, fragmentation.

    ``largest``: the item that takes most, by its name in the table; ``options`` only where it does not surely fit.
    """

    kind: Kind
    memory_bytes: int
    usable_bytes: int
    low_bytes: int | None
    high_bytes: int | None
    largest: str = ""
    options: tuple[Option, ...] = ()

    def to_json(self) -> dict[str, Any]:
        options = [{"set": option.changes, "ranks": option.ranks, "high": option.high_bytes, "built": option.is_built}
                   for option in self.options]  # fmt: skip
        fit = {"verdict": self.kind, "memory": self.memory_bytes, "usable": self.usable_bytes}
        return {**fit, "low": self.low_bytes, "high": self.high_bytes, "largest": self.largest, "options": options}


def judge(made: Forecast, memory_bytes: int) -> Fit:
    """``fits``: even the upper end of the estimate does, within `USABLE`; ``does not fit``: not even the lower end."""
    usable = round(USABLE * memory_bytes)
    low, high = made.low_bytes, made.high_bytes
    if low is None or high is None:
        return Fit("unknown", memory_bytes, usable, low, high)
    kind: Kind = "fits" if high <= usable else "does not fit" if low > usable else "may fit"
    items = items_of(made)
    options = () if kind == "fits" else tuple(_options(made, usable))[:MOST_OPTIONS]
    return Fit(kind, memory_bytes, usable, low, high, max(items, key=lambda name: items[name]), options)


def items_of(made: Forecast) -> dict[str, int]:
    """Name -> bytes of everything a rank holds, activations at their upper end."""
    states = made.states
    items = {
        "parameters": states.parameters,
        "masters": states.masters,
        "gradients": states.gradients,
        "optimizer state": states.optimizer or 0,
        "buffers": states.buffers,
        "temporaries": states.temporary,
    }
    return items | {"activations": made.activations.high if made.activations else 0}


def _options(made: Forecast, usable: int) -> Iterator[Option]:
    """One change at a time, the smallest first, then two: a smaller micro-batch, a later stage, activation
    checkpointing; more ranks where none of these is enough."""
    found = False
    for changes in _changes(made.plan, made.facts):
        option = _try(made, changes, None, usable)
        if option is not None:
            found = True
            yield option
    ranks, most = 2 * made.plan.world.size, MOST_RANKS * made.plan.world.size
    while not found and ranks <= most:
        for changes in ({}, {"zero_optimization.stage": 3}):
            option = _try(made, changes, ranks, usable)
            if option is not None:
                found = True
                yield option
        ranks *= 2


def _changes(plan: Plan, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    smaller = [_micro(plan, micro) for micro in _halves(plan.batch.micro_batch_size)]
    later = [{"zero_optimization.stage": stage} for stage in range(plan.zero.stage + 1, 4) if plan.degrees.dp > 1]
    can_repeat = facts.forward is not None and facts.blocks and not checkpoints_activations(plan.config)
    again = [{"activation_checkpointing.number_checkpoints": len(facts.blocks)}] if can_repeat else []
    yield from smaller
    yield from later
    yield from again
    yield from ({**stage, **micro} for stage in later for micro in smaller[-1:])
    yield from ({**stage, **once_more} for stage in later for once_more in again)
    yield from ({**stage, **micro, **once_more} for stage in later for micro in smaller[-1:] for once_more in again)


def _halves(number: int) -> Iterator[int]:
    while number % 2 == 0:
        number //= 2
        yield number
    if number > 1:
        yield 1


def _micro(plan: Plan, micro: int) -> dict[str, Any]:
    """A smaller micro-batch at the same global batch."""
    batch = plan.batch
    accumulation = batch.accumulation_steps * batch.micro_batch_size // micro
    return {TOTAL: batch.global_batch_size, MICRO: micro, ACCUMULATION: accumulation}


def _try(made: Forecast, changes: dict[str, Any], ranks: int | None, usable: int) -> Option | None:
    tried = variant(made.plan, changes, ranks)
    if tried is None:
        return None
    high = forecast(tried, made.facts).high_bytes
    if high is None or high > usable:
        return None
    return Option(changes, ranks, high, is_built=not set(tried.config.not_built) - set(made.plan.config.not_built))


def variant(plan: Plan, changes: dict[str, Any], ranks: int | None = None) -> Plan | None:
    """The plan with other settings, features that are not built here included; None where they do not go together."""
    try:
        config = load_config(plan.config.raw, overrides=changes)
    except ConfigError:
        return None
    world = plan.world if ranks is None else imagined_world(config, ranks, plan.world.how)
    return imagined_plan(config, world, plan.facts)


def imagined_plan(config: Config, world: World, facts: ModelFacts | None = None) -> Plan | None:
    """A plan that may hold features that this engine lacks; None where anything else is wrong."""
    made, findings = sketch(config, world, facts)
    wrong = any(problem.code != NOT_BUILT for problem in findings.problems)
    return None if wrong or findings.needs_values else made
