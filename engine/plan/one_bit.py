"""The 1-bit optimizers in the plan: what they cannot combine with, when they switch, and what that saves. No torch.

Volumes are in bits per parameter and step, up to the common factor of a ring over N ranks, 2 (N - 1) / N: an all-reduce
in fp32 counts 32, one in 16 bit 16, a 1-bit round 1, a step without communication 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.plan.plan import Degrees, OptimizerPlan, PrecisionPlan, ZeroPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
PARAMS = "optimizer.params"
SWITCH = {"OneBitAdam": "freeze_step", "ZeroOneAdam": "var_freeze_step", "OneBitLamb": "freeze_step"}
BITS = {"fp32": 32, "bf16": 16, "fp16": 16}


@dataclass
class RoundSchedule:
    """Which rounds 0/1 Adam runs at which step (Lu et al., arXiv 2202.06009), as counters that a step advances.

    Until ``var_freeze_step`` the variance is refreshed, from a full-precision all-reduce, at the steps that
    ``variance_interval`` divides; the interval doubles after every ``var_update_scaler`` refreshes. After it ranks
    synchronise at the steps that ``local_interval`` divides; it doubles every ``local_step_scaler`` steps, up to
    ``local_step_clipper``. ``num_refreshes`` and ``num_local_steps`` count since the last doubling.
    """

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int
    variance_interval: int = 1
    num_refreshes: int = 0
    num_refreshes_in_all: int = 0
    local_interval: int = 1
    num_local_steps: int = 0

    def is_local(self, step: int) -> bool:
        """Whether momentum is kept apart on the ranks in this step, the variance being frozen."""
        return step > self.var_freeze_step

    def refreshes(self, step: int) -> bool:
        return not self.is_local(step) and step % self.variance_interval == 0

    def synchronises(self, step: int) -> bool:
        return self.is_local(step) and step % self.local_interval == 0

    def advance(self, step: int) -> None:
        """After step ``step``."""
        if self.is_local(step):
            self.num_local_steps += 1
            if self.num_local_steps == self.local_step_scaler:
                self.num_local_steps = 0
                self.local_interval = min(self.local_step_clipper, 2 * self.local_interval)
        elif self.refreshes(step):
            self.num_refreshes += 1
            self.num_refreshes_in_all += 1
            if self.num_refreshes == self.var_update_scaler:
                self.num_refreshes = 0
                self.variance_interval *= 2


@dataclass(frozen=True)
class Rounds:
    """How many steps of a run send gradients in full, one bit, or nothing."""

    full: int
    one_bit: int
    none: int = 0

    def bits(self, full_bits: int) -> float:
        """Bits per parameter and step, on average; a full round counts ``full_bits``."""
        return (self.full * full_bits + self.one_bit) / max(self.full + self.one_bit + self.none, 1)


def rounds(optimizer: OptimizerPlan, num_steps: int) -> Rounds:
    """The rounds of ``num_steps`` steps of a 1-bit optimizer."""
    params = optimizer.params
    if optimizer.type != "ZeroOneAdam":
        full = min(params["freeze_step"], num_steps)
        return Rounds(full, num_steps - full)
    schedule = RoundSchedule(**{key: params[key] for key in ROUND_KEYS})
    full = one_bit = none = 0
    for step in range(1, num_steps + 1):
        if schedule.refreshes(step):
            full += 1
        elif schedule.is_local(step) and not schedule.synchronises(step):
            none += 1
        else:
            one_bit += 1
        schedule.advance(step)
    return Rounds(full, one_bit, none)


ROUND_KEYS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")


def resolve_one_bit(
    config: Config, optimizer: OptimizerPlan | None, degrees: Degrees, zero: ZeroPlan, findings: Findings
) -> ZeroPlan:
    """Check a 1-bit optimizer against the rest of the config; returns ``zero`` with the buckets that it needs."""
    if optimizer is None or optimizer.type not in ONE_BIT:
        return zero
    name, params = optimizer.type, optimizer.params
    stage = config.zero_optimization.stage
    if stage > 0:
        findings.problem(
            "zero_optimization.stage",
            f"{name} cannot train at stage {stage}: a rank applies a momentum that travelled as signs to every "
            "parameter, so it needs the whole variance and its own errors, and sharding them would bring back a full "
            "all-gather in every step",
            found=stage,
            allowed="0",
            repair="set zero_optimization.stage to 0, or use AdamW or Lamb",
        )
    for key in ROUND_KEYS if name == "ZeroOneAdam" else (SWITCH[name],):
        if params[key] < 1:
            why = "a variance that has seen no gradient cannot be frozen" if "freeze" in key else "it counts steps"
            findings.problem(f"{PARAMS}.{key}", f"{params[key]} is too small: {why}", found=params[key], allowed=">= 1")
    switch, steps = params[SWITCH[name]], config.training.steps
    if steps is not None and switch >= steps:
        findings.note(
            f"{PARAMS}.{SWITCH[name]}",
            f"{switch} is not before the end of training ({steps} steps): the compression stage is never reached; "
            "a usual choice is 15 to 25 % of all steps",
        )
    horizon = 1.0 / (1.0 - params["betas"][1])
    num_updates = rounds(optimizer, switch).full
    if num_updates < 2.0 * horizon and not params.get("bias_correction"):
        findings.note(
            f"{PARAMS}.{SWITCH[name]}",
            f"the variance is frozen after {num_updates} gradients while beta2 looks back {horizon:.0f}: it has come "
            f"to {1.0 - params['betas'][1] ** num_updates:.2g} of its size, so later updates are too large; freeze "
            "later, lower beta2, or set bias_correction to true",
        )
    memory = 1.0 / (1.0 - params["coeff_beta"]) if name == "OneBitLamb" else 0.0
    if memory > switch:
        findings.note(
            f"{PARAMS}.coeff_beta",
            f"the average of the trust ratios starts at 0 and looks back {memory:.0f} steps, so {switch} steps of "
            "warm-up leave it too small",
        )
    if degrees.dp == 1:
        findings.note("optimizer.type", f"on one rank nothing travels: {name} compresses nothing")
    if params.get("compat") == "deepspeed":
        for key in ("bias_correction", "eps_inside_sqrt"):
            if params.get(key):
                findings.note(
                    f"{PARAMS}.{key}", f'no effect with "compat": "deepspeed": DeepSpeed ignores it for {name}'
                )
    whole_groups = params["compression_unit"] == "group"
    return replace(zero, whole_groups=whole_groups)


def note_consumed(name: str, key: str, value: Any, findings: Findings) -> None:
    """What becomes of DeepSpeed's keys that the 1-bit optimizers do not read."""
    path = f"{PARAMS}.{key}"
    if key == "cuda_aware" and value:
        findings.note(path, "no effect: messages go through the process group, which knows its devices")
    elif key == "comm_backend_name":
        findings.note(path, f"no effect: {value} or not, messages go through the backend of the process group")


def describe(
    optimizer: OptimizerPlan | None, degrees: Degrees, precision: PrecisionPlan, num_steps: int | None
) -> list[str]:
    """For the printed plan: when compression begins, and what it saves over the run. Empty for other optimizers."""
    if optimizer is None or optimizer.type not in ONE_BIT or degrees.dp == 1:
        return []
    switch = optimizer.params[SWITCH[optimizer.type]]
    lines = [f"gradients are all-reduced up to step {switch:,}; from step {switch + 1:,} on momentum travels in 1 bit"]
    if optimizer.type == "ZeroOneAdam":
        lines = [
            f"up to step {switch:,} gradients travel in 1 bit, in full where the variance is refreshed; from step "
            f"{switch + 1:,} on ranks step alone and synchronise in 1 bit, at most "
            f"{optimizer.params['local_step_clipper']} steps apart"
        ]
    if num_steps:
        made, wire = rounds(optimizer, num_steps), BITS[precision.reduce]
        against = ", ".join(f"{bits / made.bits(wire):.3g} times less than {label}" for label, bits in _compared(wire))
        silent = f", {made.none:,} silent" if made.none else ""
        lines.append(
            f"of {num_steps:,} steps {made.full:,} in full, {made.one_bit:,} in 1 bit{silent}: "
            f"{made.bits(wire):.3g} bits per parameter and step, {against}"
        )
    return lines


def _compared(wire: int) -> list[tuple[str, int]]:
    return [("fp32", 32), ("16 bit", 16)] if wire == 32 else [("16 bit", 16)]
