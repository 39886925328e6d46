"""Bytes that model states take on one rank, from the plan and the model's size. Activations are not counted."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.facts import ModelFacts
from engine.plan.plan import Dtype, OptimizerPlan, Plan

DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

MOMENTS = {
    "AdamW": 2, "Adam": 2, "RAdam": 2, "NAdam": 2, "Adamax": 2, "Lamb": 2, "Adadelta": 2, "Rprop": 2,
    "Adagrad": 1, "RMSprop": 1, "Lion": 1, "SGD": 0, "Muon": 1, "Adafactor": 0, "ASGD": 1,
    "OneBitAdam": 4, "ZeroOneAdam": 6, "OneBitLamb": 6,
}  # fmt: skip
"""fp32 numbers that an optimizer keeps per trainable element. Muon's is of its matrices; Adafactor's are vectors.
The 1-bit optimizers' are of their compression stage: errors, divisors and what else they keep from step to step."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank between steps. ``optimizer_bytes`` (moments, and masters of a replicated 16-bit model) is None
    for an optimizer that is not known here. ``gathered_bytes`` come on top while blocks are in use (stage 3)."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    gathered_bytes: int

    @property
    def total_bytes(self) -> int | None:
        if self.optimizer_bytes is None:
            return None
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.gathered_bytes


def estimate_memory(plan: Plan, facts: ModelFacts) -> MemoryEstimate:
    """What ZeRO's formula says for this plan: each kind of state is divided by the ranks from its stage on.

    Of tp ranks and pipeline stages each is taken to hold an equal part; `states_by_rank` knows what each holds.
    """
    stage, shard, parts = plan.zero.stage, plan.shard_size, plan.degrees.tp * plan.degrees.pp
    compute = DTYPE_BYTES[plan.precision.compute]
    total, trainable = _share(facts.num_parameters, parts), _share(facts.num_trainable_parameters, parts)
    masters = 0 if plan.precision.compute == "fp32" else 4
    if stage == 3:
        # The shard is the fp32 master itself; 16-bit copies exist only while a group of blocks is gathered.
        parameters, masters = 4 * _share(total, shard), 0
        blocks = _share(facts.num_block_parameters or 0, plan.degrees.tp)
        gathered = compute * min(total, max(plan.zero.group_elements, blocks))
    else:
        parameters, gathered = compute * total, 0
    gradients = DTYPE_BYTES[plan.precision.accumulate] * _share(trainable, shard if stage >= 2 else 1)
    moments = num_moments(plan.optimizer)
    optimizer = None if moments is None else (4 * moments + masters) * _share(trainable, shard if stage >= 1 else 1)
    return MemoryEstimate(parameters, gradients, optimizer, gathered)


def _share(elements: int, ranks: int) -> int:
    return -(-elements // ranks)


def num_moments(optimizer: OptimizerPlan | None) -> int | None:
    """fp32 numbers that the optimizer keeps per element; None for one that is not known here."""
    if optimizer is None or optimizer.type not in MOMENTS:
        return None
    params = optimizer.params
    extra = sum(bool(params.get(key)) for key in ("amsgrad", "centered"))
    if optimizer.type in ("SGD", "RMSprop"):
        extra += bool(params.get("momentum"))
    return MOMENTS[optimizer.type] + extra


def format_bytes(count: int) -> str:
    """``1.5 GB``, ``207 MB``: three digits, powers of 1000."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
