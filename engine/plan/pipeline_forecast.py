"""What the stages of a pipeline hold and compute, and how long ranks wait for each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.plan.activations import bytes_of_stage, checkpoints, micro_batches_held, samples_at_once
from engine.plan.facts import ModelFacts
from engine.plan.pipeline_schedules import bubble_fraction
from engine.plan.plan import Plan
from engine.plan.stages import stages_of


@dataclass(frozen=True)
class StageForecast:
    """``layers``: the first and the one behind the last. ``parameters``: elements, of what is around the layers too.

    ``forward_flops`` and ``backward_flops``: of one micro-batch; None where the model was not measured.
    ``activation_bytes``: what one micro-batch keeps; ``micro_batches_held``: the most that do at once.
    """

    stage: int
    rank: int
    layers: tuple[int, int]
    parameters: int
    forward_flops: int | None
    backward_flops: int | None
    activation_bytes: int | None
    micro_batches_held: int

    @property
    def flops(self) -> int:
        return (self.forward_flops or 0) + (self.backward_flops or 0)


@dataclass(frozen=True)
class PipelineForecast:
    """``bubble``: the idle part of a step where all stages take equally long, by formula."""

    stages: tuple[StageForecast, ...]
    bubble: float

    @property
    def is_measured(self) -> bool:
        """Whether FLOPs are known, by which stages can be compared."""
        return all(stage.flops for stage in self.stages)

    def of_mean(self, stage: StageForecast) -> float:
        """The time of a stage over that of the mean one, if time goes with FLOPs."""
        mean = sum(each.flops for each in self.stages) / len(self.stages)
        return stage.flops / mean if mean else 1.0

    @property
    def slowest(self) -> float:
        """The time of the slowest rank over that of the mean one."""
        by_rank: dict[int, int] = {}
        for stage in self.stages:
            by_rank[stage.rank] = by_rank.get(stage.rank, 0) + stage.flops
        return max(by_rank.values()) * len(by_rank) / sum(by_rank.values())

    def to_json(self) -> dict[str, Any]:
        return {"bubble": self.bubble, "stages": [{**asdict(s), "layers": list(s.layers)} for s in self.stages]}


def forecast_pipeline(plan: Plan, facts: ModelFacts) -> PipelineForecast | None:
    """None without a pipeline. Raises EngineError where the layers cannot be cut so."""
    pipeline = plan.pipeline
    if pipeline is None:
        return None
    stages = stages_of(plan, facts)
    held = {
        s: n for r in range(plan.degrees.pp) for s, n in zip(stages.on(r), micro_batches_held(plan, r), strict=True)
    }
    made = []
    for stage in range(stages.last + 1):
        flops = _flops(plan, facts, stage)
        ends = stages.bounds[stage], stages.bounds[stage + 1]
        kept = bytes_of_stage(plan, facts, stage)
        made.append(
            StageForecast(stage, stages.rank_of(stage), ends, stages.parameters_of(stage), *flops, kept, held[stage])
        )
    bubble = bubble_fraction(pipeline.schedule, plan.degrees.pp, pipeline.num_micro_batches, pipeline.virtual_stages)
    return PipelineForecast(tuple(made), bubble)


def _flops(plan: Plan, facts: ModelFacts, stage: int) -> tuple[int | None, int | None]:
    """Of one micro-batch, forward and backward. What is in front of the layers runs on every stage; backward takes what
    it takes of the whole model on average, and a checkpointed block its forward once more."""
    forward, stages = facts.forward, stages_of(plan, facts)
    if forward is None or not forward.block_flops:
        return None, None
    own = sum(forward.block_flops[at] for at in stages.layers_of(stage))
    behind = forward.after_flops if stage == stages.last else 0
    all_blocks = sum(forward.block_flops)
    ends = forward.before_flops + forward.after_flops
    in_backward = (forward.backward_flops - 2 * ends) / all_blocks if all_blocks else 2.0
    again = own if checkpoints(plan, facts) else 0
    front = 2 * forward.before_flops if stage == 0 else 0
    scale = samples_at_once(plan) / (forward.samples * plan.degrees.tp * plan.degrees.slices)
    return (
        round(scale * (forward.before_flops + own + behind)),
        round(scale * (in_backward * own + again + 2 * behind + front)),
    )
