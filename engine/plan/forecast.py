"""`forecast(plan, facts)`: what a step takes on the fullest rank, in bytes, collectives and FLOPs, before it is run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.plan.activations import ActivationBytes, checkpoints, count_activations
from engine.plan.collectives import Collective, count_collectives
from engine.plan.facts import ModelFacts
from engine.plan.one_bit import ONE_BIT
from engine.plan.pipeline_forecast import PipelineForecast, forecast_pipeline
from engine.plan.plan import Plan
from engine.plan.states import StateBytes, count_states

MODEL_FLOPS_PER_TOKEN = 6
"""Per parameter: 2 in forward, 4 in backward (Kaplan et al., 2020, arXiv 2001.08361)."""
HARDWARE_FLOPS_PER_TOKEN = 8
"""The same with a second forward, as activation checkpointing computes it."""


@dataclass(frozen=True)
class Compute:
    """FLOPs of one optimizer step over all ranks; a multiplication and an addition are two.

    ``measured``: of the matrix products and the attention that eager PyTorch runs, recomputation included; None where
    the model was not measured. ``model`` and ``hardware``: 6 and 8 per parameter and token, the field's shorthands;
    None where the number of tokens is not known.
    """

    ranks: int
    samples: int
    tokens: int | None
    measured: int | None
    model: int | None
    hardware: int | None

    def per_rank(self, flops: int) -> float:
        return flops / self.ranks


@dataclass(frozen=True)
class RankForecast:
    """Of the ranks that hold one pipeline rank's part of the model; without a pipeline there is one such part.

    ``in_one_bit``: the collectives of a step in which a 1-bit optimizer sends signs; () for others.
    """

    rank: int
    states: StateBytes
    activations: ActivationBytes | None
    collectives: tuple[Collective, ...]
    in_one_bit: tuple[Collective, ...] = ()

    @property
    def low_bytes(self) -> int | None:
        """The least that a step can do with; None without the optimizer's state."""
        if self.states.model_states is None:
            return None
        return self.states.model_states + self.states.buffers + (self.activations.low if self.activations else 0)

    @property
    def high_bytes(self) -> int | None:
        """With temporaries, and what operations hold while they run; the worst moments of both at once."""
        if self.states.model_states is None:
            return None
        held = self.states.model_states + self.states.buffers + self.states.temporary
        return held + (self.activations.high if self.activations else 0)

    def to_json(self) -> dict[str, Any]:
        states = {name: value for name, value in asdict(self.states).items() if name != "largest_temporary"}
        return {
            "pipeline_rank": self.rank,
            "bytes": {
                **states,
                "model_states": self.states.model_states,
                "temporary_is": self.states.largest_temporary,
                "activations": asdict(self.activations) if self.activations else None,
                "low": self.low_bytes,
                "high": self.high_bytes,
            },
            "collectives": [asdict(collective) for collective in self.collectives],
            **({"collectives_in_one_bit": [asdict(each) for each in self.in_one_bit]} if self.in_one_bit else {}),
        }


@dataclass(frozen=True)
class Forecast:
    """``ranks``: one entry for each pipeline rank. What is said of "the rank" is said of the one that needs most.

    ``pipeline``: what its stages hold and compute; None without a pipeline.
    """

    plan: Plan
    facts: ModelFacts
    ranks: tuple[RankForecast, ...]
    compute: Compute
    pipeline: PipelineForecast | None = None

    @property
    def fullest(self) -> RankForecast:
        def need(rank: RankForecast) -> int:
            states = rank.states
            activations = rank.activations.high if rank.activations else 0
            return (states.model_states or states.parameters) + states.temporary + activations

        return max(self.ranks, key=need)

    @property
    def pipeline_rank(self) -> int:
        return self.fullest.rank

    @property
    def states(self) -> StateBytes:
        return self.fullest.states

    @property
    def activations(self) -> ActivationBytes | None:
        return self.fullest.activations

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return self.fullest.collectives

    @property
    def low_bytes(self) -> int | None:
        return self.fullest.low_bytes

    @property
    def high_bytes(self) -> int | None:
        return self.fullest.high_bytes

    def to_json(self) -> dict[str, Any]:
        """What ``ptrain plan --json`` prints of it; bytes, calls and FLOPs as they are."""
        pipeline = {} if self.pipeline is None else {
            "pipeline": {**self.pipeline.to_json(), "ranks": [rank.to_json() for rank in self.ranks]}
        }  # fmt: skip
        return {
            **self.fullest.to_json(),
            "compute": asdict(self.compute),
            **pipeline,
            "not_measured": self.facts.why_not_measured,
        }


def forecast(plan: Plan, facts: ModelFacts) -> Forecast:
    """Needs ``facts.parameters``; activations and measured FLOPs need ``facts.forward`` as well.

    Raises EngineError where the model cannot be cut into the stages that the plan asks for.
    """
    compresses = plan.optimizer is not None and plan.optimizer.type in ONE_BIT and plan.num_replicas > 1
    ranks = tuple(
        RankForecast(
            r,
            count_states(plan, facts, r),
            count_activations(plan, facts, r),
            count_collectives(plan, facts, r),
            count_collectives(plan, facts, r, in_one_bit=True) if compresses else (),
        )
        for r in range(plan.degrees.pp)
    )
    return Forecast(plan, facts, ranks, count_compute(plan, facts), forecast_pipeline(plan, facts))


def count_compute(plan: Plan, facts: ModelFacts) -> Compute:
    """Of one step over all ranks: every sample of the global batch passes through the whole model once."""
    samples, forward = plan.batch.global_batch_size, facts.forward
    tokens = samples * plan.config.data.sequence_length if plan.config.data.sequence_length else None
    measured = None
    if forward is not None:
        tokens = samples * forward.sequence_length
        again = forward.block_forward_flops if checkpoints(plan, facts) else 0
        measured = (forward.forward_flops + forward.backward_flops + again) * samples // forward.samples
    per_token = facts.num_parameters * tokens if tokens is not None else None
    return Compute(
        ranks=plan.world.size,
        samples=samples,
        tokens=tokens,
        measured=measured,
        model=None if per_token is None else MODEL_FLOPS_PER_TOKEN * per_token,
        hardware=None if per_token is None else HARDWARE_FLOPS_PER_TOKEN * per_token,
    )
