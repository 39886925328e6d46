"""Bytes that one rank sends per optimizer step, from the plan and the model's size.

Counted as the ledger does (engine/collectives/ledger.py): an all-reduce of B bytes over N ranks sends 2 (N-1)/N B, a
reduce-scatter and an all-gather (N-1)/N B each.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.estimates import DTYPE_BYTES
from engine.plan.facts import ModelFacts
from engine.plan.plan import Plan


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes per optimizer step that one rank sends: gradients to be reduced, parameters to be gathered."""

    gradient_bytes: int
    parameter_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.gradient_bytes + self.parameter_bytes


def estimate_traffic(plan: Plan, facts: ModelFacts) -> TrafficEstimate:
    """What the stage makes a rank send (docs/how_a_step_works.md has the table)."""
    stage, shard, replicas = plan.zero.stage, plan.shard_size, plan.num_replicas
    gradients = facts.num_trainable_parameters * DTYPE_BYTES[plan.precision.reduce]
    compute = DTYPE_BYTES[plan.precision.compute]
    rounds = plan.batch.accumulation_steps if stage >= 2 and plan.batch.managed else 1
    sent = rounds * (_part(shard) * gradients + 2 * _part(replicas) * gradients / shard)
    if stage == 3:
        gathered = rounds * _part(shard) * (facts.num_parameters + _gathered_again(plan, facts)) * compute
    else:
        gathered = _part(shard) * facts.num_trainable_parameters * compute
    return TrafficEstimate(round(sent), round(gathered))


def _gathered_again(plan: Plan, facts: ModelFacts) -> int:
    """Elements that backward gathers a second time: those of the blocks, which forward let go of."""
    if not plan.zero.reshard_after_forward or facts.num_parameters <= plan.zero.group_elements:
        return 0
    if facts.num_block_parameters is None:
        return facts.num_parameters
    return min(facts.num_parameters, len(facts.blocks) * facts.num_block_parameters)


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks
