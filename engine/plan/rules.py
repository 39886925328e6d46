"""Rules across sections that only check or remark; what a rule resolves stands in the file of its subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.facts import ModelFacts
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
        )


def check_not_built(config: Config, findings: Findings) -> None:
    """Features that are switched on, that DeepSpeed has, and that this engine lacks."""
    for path in config.not_built:
        findings.problem(path, "is valid, but not built here", code="not-built", repair="switch it off")


def check_autos(config: Config, findings: Findings) -> None:
    """What is still "auto" and has no meaning of its own here needs a value; see `AUTO_DEFAULTS`."""
    for path in sorted(config.autos):
        if path in _RESOLVED_ELSEWHERE or path.startswith(("optimizer.", "scheduler.")):
            continue
        if any(path == key or (key.endswith(".") and path.startswith(key)) for key in AUTO_DEFAULTS):
            if path in ("bf16.enabled", "fp16.enabled"):
                findings.note(path, '"auto" is false when nothing else decides')
            continue
        findings.missing(path)


_RESOLVED_ELSEWHERE = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
)

AUTO_DEFAULTS = (
    "fp16.",
    "bf16.",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.max_live_parameters",
    "zero_optimization.max_reuse_distance",
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_scatter",
    "communication_data_type",
    "data_types.",
    "torch_autocast.dtype",
    "device",
    "seed",
)
"""Keys whose "auto" means the default or the derived value here; a trailing dot covers a whole section."""


def note_vocabulary(config: Config, findings: Findings) -> None:
    size = config.vocabulary_size
    if size is not None and size % 8:
        findings.note("vocabulary_size", f"{size} is not a multiple of 8, which slows matrix products on GPUs")


def note_facts(config: Config, degrees: Degrees, facts: ModelFacts | None, findings: Findings) -> None:
    """What only the model can tell."""
    if facts is None or config.zero_optimization.stage != 3:
        return
    if not facts.blocks:
        findings.note(
            "zero_optimization.stage",
            "the model has no repeated blocks: its parameters are gathered all at once (model.blocks names them)",
        )
    if facts.num_parameters < degrees.dp_shard:
        findings.note(
            "zero_optimization.stage",
            f"{facts.num_parameters} parameters over {degrees.dp_shard} ranks: some ranks hold none",
        )
