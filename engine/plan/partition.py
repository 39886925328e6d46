"""Where a model's layers are cut into pipeline stages: pure functions of their weights and the number of stages.

A cut is a tuple of bounds: stage ``s`` holds the layers ``[bounds[s], bounds[s + 1])``, at least one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.messages import EngineError
from engine.plan.findings import plural

Bounds = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One unit of a cut. ``num_parameters`` are trainable elements; ``kind`` is its class's name."""

    name: str
    kind: str
    num_parameters: int


def cut(
    method: str | Sequence[int],
    layers: Sequence[Layer],
    num_stages: int,
    before: int = 0,
    after: int = 0,
    times: Sequence[int] = (),
) -> Bounds:
    """The bounds that `pipeline.partition` asks for.

    ``method``: "uniform", "parameters" (and "best", the same), "time", "type:REGEX", or the number of layers of each
    stage. ``before`` and ``after``: trainable elements outside the layers, which the first and the last stage hold as
    well. ``times``: of what is in front of the layers, of each layer, and of what is behind them, in any unit; where
    they are not known "time" goes by parameters.

    Raises EngineError, with the arithmetic and the nearest that fits, for more stages than layers, a list that does
    not add up, a pattern that matches too few layers, and a stage without parameters.
    """
    if num_stages > len(layers):
        raise EngineError(
            f"pipeline.stages: {plural(num_stages, 'stage')} (with virtual ones) need at least as many layers, and the "
            f"model has {plural(len(layers), 'layer')} to deal out; at most {len(layers)} fit"
        )
    if not isinstance(method, str):
        bounds = _given(method, len(layers), num_stages)
    elif method == "uniform":
        bounds = uniform(len(layers), num_stages)
    elif method.startswith("type:"):
        bounds = by_type(method.removeprefix("type:"), [layer.kind for layer in layers], num_stages)
    elif method == "time" and times:
        weights = list(times[1:-1])
        weights[0] += times[0]
        weights[-1] += times[-1]
        bounds = balanced(weights, num_stages)
    else:
        weights = [layer.num_parameters for layer in layers]
        weights[0] += before
        weights[-1] += after
        bounds = balanced(weights, num_stages)
    _check_parameters(bounds, layers, before, after)
    return bounds


def uniform(num_layers: int, num_stages: int) -> Bounds:
    """Counts that differ by at most one; the first stages have the larger ones, as in DeepSpeed."""
    share, extra = divmod(num_layers, num_stages)
    return tuple(itertools.accumulate((share + (stage < extra) for stage in range(num_stages)), initial=0))


def balanced(weights: Sequence[int], num_stages: int) -> Bounds:
    """The cut whose heaviest stage is lightest, for it sets the pace; among those the most even one (least squares).

    Exact, by dynamic programming over (stage, bound). Every stage gets at least one layer.
    """
    total = list(itertools.accumulate(weights, initial=0))
    num_layers = len(weights)
    heaviest = _best(total, num_stages, num_layers, lambda so_far, weight: max(so_far, weight))[0]

    def squares(so_far: float, weight: float) -> float:
        return so_far + weight * weight if weight <= heaviest else float("inf")

    return _best(total, num_stages, num_layers, squares)[1]


def by_type(pattern: str, kinds: Sequence[str], num_stages: int) -> Bounds:
    """Balance how many layers have a class whose name ``pattern`` matches (anywhere in it, in any case)."""
    matches = [int(re.search(pattern, kind, re.IGNORECASE) is not None) for kind in kinds]
    if sum(matches) < num_stages:
        found = ", ".join(sorted(set(kinds)))
        raise EngineError(
            f"pipeline.partition: type:{pattern} matches {plural(sum(matches), 'layer')} and there are "
            f"{plural(num_stages, 'stage')}; each needs one. The layers are of: {found}"
        )
    return balanced(matches, num_stages)


def _given(counts: Sequence[int], num_layers: int, num_stages: int) -> Bounds:
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        near = uniform(num_layers, num_stages)
        nearest = [after - before for before, after in itertools.pairwise(near)]
        raise EngineError(
            f"pipeline.partition: {list(counts)} deals out {plural(sum(counts), 'layer')} to "
            f"{plural(len(counts), 'stage')}; there are {plural(num_layers, 'layer')} and "
            f"{plural(num_stages, 'stage')} (with virtual ones), and each needs one at least: {nearest} would fit"
        )
    return tuple(itertools.accumulate(counts, initial=0))


def _best(total: Sequence[int], num_stages: int, num_layers: int, combine: object) -> tuple[float, Bounds]:
    """The least value of ``combine`` folded over the stages' weights, and the bounds that give it; of equal ones those
    with later bounds, so that the first stages take the larger part."""
    start: dict[int, tuple[float, Bounds]] = {0: (0.0, (0,))}
    for stage in range(1, num_stages + 1):
        reached: dict[int, tuple[float, Bounds]] = {}
        left = num_stages - stage
        for end in range(stage, num_layers - left + 1) if left else (num_layers,):
            for begin, (so_far, bounds) in start.items():
                if begin >= end:
                    continue
                value = combine(so_far, total[end] - total[begin])  # type: ignore[operator]
                if end not in reached or (value, [-b for b in bounds]) < (
                    reached[end][0],
                    [-b for b in reached[end][1][:-1]],
                ):
                    reached[end] = value, (*bounds, end)
        start = reached
    return start[num_layers]


def _check_parameters(bounds: Bounds, layers: Sequence[Layer], before: int, after: int) -> None:
    held = [sum(layer.num_parameters for layer in layers[a:b]) for a, b in itertools.pairwise(bounds)]
    held[0] += before
    held[-1] += after
    empty = [stage for stage, number in enumerate(held) if number == 0]
    if empty:
        stage = empty[0]
        names = ", ".join(layer.name for layer in layers[bounds[stage] : bounds[stage + 1]])
        with_some = sum(layer.num_parameters > 0 for layer in layers)
        raise EngineError(
            f"pipeline: stage {stage} of {len(held)} would hold {names} and nothing to train; "
            f"{with_some} of the {len(layers)} layers have trainable parameters: use pipeline.partition parameters, a "
            f"list, or at most {max(with_some, 1)} stages"
        )
