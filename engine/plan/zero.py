"""How gradients and parameters travel: `zero_optimization` and the keys that divide gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.plan import Degrees, ZeroPlan
from engine.plan.world import resolve_reshard

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

DEFAULT_BUCKET_ELEMENTS = 25 * 2**20 // 4
"""25 MB of fp32, as DistributedDataParallel: large enough for bandwidth, small enough to overlap with backward."""

DEFAULT_GROUP_ELEMENTS = 2**20
"""4 MB of fp32: small blocks are gathered together, large blocks one by one."""


def resolve_zero(config: Config, degrees: Degrees, findings: Findings) -> ZeroPlan:
    stage = findings.resolved("zero_optimization.stage", config.zero_optimization.stage)
    reduce_op = findings.resolved("gradient_allreduce_op", config.gradient_allreduce_op)
    return ZeroPlan(
        stage=stage,
        bucket_elements=_bucket_elements(config, findings) if stage < 3 else 0,
        group_elements=_group_elements(config, findings) if stage == 3 else 0,
        reshard_after_forward=resolve_reshard(config, degrees, findings),
        predivide_factor=_predivide_factor(config, degrees, reduce_op, findings),
        reduce_op=reduce_op,
    )


def _bucket_elements(config: Config, findings: Findings) -> int:
    path = "zero_optimization.reduce_bucket_size"
    if findings.is_given(path):
        return findings.resolved(path, max(1, config.zero_optimization.reduce_bucket_size))
    reason = "25 MB: small enough to overlap with backward and to keep gradients sharded"
    return findings.resolved(path, DEFAULT_BUCKET_ELEMENTS, reason, "derived")


def _group_elements(config: Config, findings: Findings) -> int:
    path = "zero_optimization.prefetch_bucket_size"
    if findings.is_given(path):
        return findings.resolved(path, config.zero_optimization.prefetch_bucket_size)
    reason = "consecutive blocks are gathered together up to 4 MB: fewer collectives for small models"
    return findings.resolved(path, DEFAULT_GROUP_ELEMENTS, reason, "derived")


def _predivide_factor(config: Config, degrees: Degrees, reduce_op: str, findings: Findings) -> float:
    """Gradients are divided by this before the reduction and by dp / this after it."""
    factor = config.gradient_predivide_factor
    path = "gradient_predivide_factor"
    if reduce_op == "sum":
        for key, acts in (("prescale_gradients", config.prescale_gradients), (path, factor != 1.0)):
            if acts:
                findings.note(key, "no effect: gradient_allreduce_op is sum, which divides nothing")
        return 1.0
    if not config.prescale_gradients:
        return findings.resolved(path, float(factor)) if factor != 1.0 else 1.0
    if factor != 1.0:
        findings.note(path, "no effect, as in DeepSpeed: prescale_gradients divides by all ranks beforehand")
    return findings.resolved(path, float(degrees.dp), "prescale_gradients divides before the reduction", "derived")
