"""What a config means for one world: `plan(config, world, facts=None) -> Plan`. Imports no torch."""

from engine.plan.plan import (
    BatchPlan,
    Degrees,
    LossScalePlan,
    OptimizerPlan,
    Plan,
    PrecisionPlan,
    Resolved,
    SchedulePlan,
    World,
    ZeroPlan,
)

__all__ = [
    "BatchPlan",
    "Degrees",
    "LossScalePlan",
    "OptimizerPlan",
    "Plan",
    "PrecisionPlan",
    "Resolved",
    "SchedulePlan",
    "World",
    "ZeroPlan",
]
