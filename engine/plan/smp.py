"""What SMP's parameters promise of a run that only the degrees can tell (the rest: engine/config/smp.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.findings import plural
from engine.plan.placement import PLACEMENT

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings
    from engine.plan.plan import Degrees


def check_smp(config: Config, degrees: Degrees, findings: Findings) -> None:
    """horovod, ddp, prescaled_batch, active_microbatches and the placement, against the degrees."""
    section = config.smp
    if section is None:
        return
    if section.horovod:
        findings.problem("smp.horovod", "is true: there is no TensorFlow here", found=True, allowed="false")
    if section.ddp is False and (degrees.dp > 1 or degrees.tp > 1):
        why = (
            f"gradients are always averaged over the {degrees.dp} data-parallel ranks"
            if degrees.dp > 1
            else f"SMP itself needs ddp with tensor_parallel_degree {degrees.tp}"
        )
        findings.problem("smp.ddp", f"is false: {why}", found=False, allowed="true")
    elif section.ddp is not None:
        findings.note("smp.ddp", "implied: the engine averages gradients over data-parallel ranks; do not wrap in DDP")
    if degrees.tp > 1:
        same = f"the {degrees.tp} ranks that share each layer always get the same samples here"
        if section.prescaled_batch is False:
            findings.problem(
                "smp.prescaled_batch",
                f"is false: {same}",
                found=False,
                allowed="true",
                repair=f"set it to true; for the same global batch multiply the micro-batch size by {degrees.tp}",
            )
        elif section.prescaled_batch is None:
            findings.note("smp", f"prescaled_batch is true, not false as in SMP: {same}")
    elif section.prescaled_batch is not None:
        findings.note("smp.prescaled_batch", "has no effect without tensor parallelism, in SMP as well")
    if section.active_microbatches is not None:
        _check_active(section.active_microbatches, degrees.pp, findings)
    letters = sum(size > 1 for size in (degrees.pp, degrees.dp * degrees.cp * degrees.sp, degrees.tp))
    if letters > 1 and not findings.is_given(PLACEMENT):
        default = 'SMP places by "cluster" unless placement_strategy says otherwise'
        findings.note("smp", f"{PLACEMENT} is {degrees.placement}; {default}")


def _check_active(active: int, stages: int, findings: Findings) -> None:
    path = "smp.active_microbatches"
    if stages == 1:
        findings.note(path, "has no effect without a pipeline")
    elif active < stages:
        findings.problem(
            path,
            f"{active} is too few: the first of {plural(stages, 'stage')} holds {stages} micro-batches before the "
            "first of them comes back",
            found=active,
            allowed=f">= {stages}",
            repair="raise it, or use fewer stages",
        )
    else:
        findings.note(path, f"has no effect: at most {stages} micro-batches are in flight, one per stage")
