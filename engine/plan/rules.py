"""Rules across sections that only check or remark; what a rule resolves stands in the file of its subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config.auto import needs_values
from engine.plan.batch import ACCUMULATION, MICRO, TOTAL
from engine.plan.facts import ModelFacts
from engine.plan.ineffective import value_at
from engine.plan.plan import Degrees, World

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings


def resolve_clipping(config: Config, findings: Findings) -> float:
    """The largest global L2 norm of the gradients; 0 is no clipping. Absent is not off."""
    path = "gradient_clipping"
    if not findings.is_given(path):
        value = config.gradient_clipping
        findings.note(path, f"gradients are clipped to norm {value:g} as in DeepSpeed; 0 switches clipping off")
        return findings.resolved(path, value, "DeepSpeed's default")
    return findings.resolved(path, config.gradient_clipping)


def check_device(config: Config, world: World, findings: Findings) -> None:
    """An accelerator that was asked for must be there; it is never replaced by the CPU in silence."""
    wanted = config.device
    if wanted in ("auto", "cpu", world.device):
        return
    findings.problem(
        "device",
        f"the config asks for {wanted}, and torch finds no {wanted} device here, only {world.device}",
        found=wanted,
        allowed=f"{world.device}, auto",
        repair='install a build of torch for the device, or set "device" to "cpu"',
        code="device",
    )


def check_local_ranks(world: World, findings: Findings) -> None:
    """One rank per accelerator of a node."""
    if world.device != "cpu" and 0 < world.device_count < world.local_size:
        findings.problem(
            "",
            f"{world.local_size} ranks run on a node that has {world.device_count} {world.device} devices",
            found=world.local_size,
            allowed=f"at most {world.device_count}",
            repair="start fewer ranks per node",
            code="ranks",
        )


def check_not_built(config: Config, findings: Findings) -> None:
    """Features that are switched on, that DeepSpeed has, and that this engine lacks."""
    for path in config.not_built:
        found = value_at(config, path)
        findings.problem(
            path,
            "is valid, but not built here",
            found=found.model_dump(mode="json") if hasattr(found, "model_dump") else found,
            repair="switch it off",
            code="not-built",
            options=("leave it out",),
        )


def check_combinations(config: Config, findings: Findings) -> None:
    """Features that exclude each other, in DeepSpeed as well."""
    if config.amp.enabled:
        others = {f"{name}.enabled": getattr(config, name).enabled for name in ("fp16", "bf16")}
        others["zero_optimization.stage"] = config.zero_optimization.stage > 0
        for path in (path for path, is_on in others.items() if is_on):
            findings.problem(
                "amp.enabled",
                f"Apex AMP keeps its own copies of the parameters and goes with no other precision and with no ZeRO; "
                f"{path} is on ({findings.source(path)})",
                found=True,
                allowed="false",
                repair="switch off one of the two",
            )
    elasticity = config.elasticity
    if elasticity is not None and elasticity.enabled and not elasticity.ignore_non_elastic_batch_info:
        for path in (TOTAL, MICRO, ACCUMULATION):
            if findings.is_given(path):
                findings.problem(
                    path,
                    f"elasticity chooses the batch sizes ({findings.source('elasticity.enabled')})",
                    found=getattr(config, path),
                    repair="remove the key, or set elasticity.ignore_non_elastic_batch_info to true",
                )


def check_autos(config: Config, findings: Findings) -> None:
    """What still says "auto" and that neither the config's table (engine/config/auto.py) nor a rule resolves."""
    resolved = {value.path for value in findings.values if value.origin == "auto"}
    findings.needs_values += [path for path in needs_values(config) if path not in resolved]


def note_vocabulary(config: Config, findings: Findings) -> None:
    size = config.vocabulary_size
    if size is not None and size % 8:
        findings.note("vocabulary_size", f"{size} is not a multiple of 8, which slows matrix products on GPUs")


def note_profile_step(config: Config, findings: Findings) -> None:
    profiler, steps = config.flops_profiler, config.training.steps
    if profiler.enabled and steps is not None and profiler.profile_step > steps:
        findings.note(
            "flops_profiler.profile_step",
            f"step {profiler.profile_step} is never reached: training ends after {steps} steps",
        )


def note_facts(config: Config, degrees: Degrees, facts: ModelFacts | None, findings: Findings) -> None:
    """What only the model can tell."""
    if facts is None or config.zero_optimization.stage != 3:
        return
    if not facts.blocks:
        findings.note(
            "zero_optimization.stage",
            "the model has no repeated blocks: its parameters are gathered all at once (model.blocks names them)",
        )
    ranks = degrees.dp_shard * degrees.slices
    if facts.num_parameters < ranks:
        findings.note(
            "zero_optimization.stage",
            f"{facts.num_parameters} parameters over {ranks} ranks: some ranks hold none",
        )
