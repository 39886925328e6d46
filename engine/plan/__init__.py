"""What a config means for one world: `plan(config, world, facts=None) -> Plan`. Imports no torch.

`engine.plan.plan` as an attribute is the function; the records stand in the module of the same name
(`from engine.plan.plan import ...`) and are all exported here.
"""

from engine.plan.diff import Change, Difference, diff
from engine.plan.estimates import MemoryEstimate, estimate_memory
from engine.plan.explain import Explained, Explanation, explain
from engine.plan.facts import ModelFacts
from engine.plan.fitting import fitting_world
from engine.plan.plan import (
    BatchPlan,
    CurriculumMetric,
    CurriculumPlan,
    Degrees,
    DifficultySchedule,
    LayerDropPlan,
    LossScalePlan,
    OptimizerPlan,
    Plan,
    PrecisionPlan,
    Resolved,
    SchedulePlan,
    TokenDropPlan,
    World,
    ZeroPlan,
)
from engine.plan.render import render_plan, render_values
from engine.plan.resolve import plan
from engine.plan.traffic import TrafficEstimate, estimate_traffic
from engine.plan.verdict import Verdict, usable, validate, verdict
from engine.plan.world import imagined_world

__all__ = [
    "BatchPlan",
    "Change",
    "CurriculumMetric",
    "CurriculumPlan",
    "Degrees",
    "Difference",
    "DifficultySchedule",
    "Explained",
    "Explanation",
    "LayerDropPlan",
    "LossScalePlan",
    "MemoryEstimate",
    "ModelFacts",
    "OptimizerPlan",
    "Plan",
    "PrecisionPlan",
    "Resolved",
    "SchedulePlan",
    "TokenDropPlan",
    "TrafficEstimate",
    "Verdict",
    "World",
    "ZeroPlan",
    "diff",
    "estimate_memory",
    "estimate_traffic",
    "explain",
    "fitting_world",
    "imagined_world",
    "plan",
    "render_plan",
    "render_values",
    "usable",
    "validate",
    "verdict",
]
