"""The curricula that a config means: which difficulties there are, how each grows, and what it governs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.plan.plan import CurriculumMetric, CurriculumPlan, DifficultySchedule

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

LEGACY = "curriculum_learning"
SAMPLING = "data_efficiency.data_sampling.curriculum_learning"
CUTTING = {"seqlen": "truncate", "seqlen_truncate": "truncate", "seqlen_reshape": "reshape"}
"""Metrics of the engine's own: the difficulty is a number of tokens, and the batch is cut to it."""


def resolve_curriculum(config: Config, findings: Findings) -> CurriculumPlan | None:
    """None where no curriculum is switched on. The sections have checked each schedule in itself."""
    metrics: list[CurriculumMetric] = []
    legacy = config.curriculum_learning
    if legacy is not None and legacy.enabled:
        use: Any = CUTTING.get(legacy.curriculum_type, "truncate")
        metrics.append(CurriculumMetric(legacy.curriculum_type, LEGACY, use, _schedule(legacy)))
    sampling = config.data_efficiency.data_sampling if config.data_efficiency is not None else None
    section = sampling.curriculum_learning if sampling is not None else None
    index_path, seed = None, config.seed
    if section is not None and section.enabled:
        assert config.data_efficiency is not None
        index_path = section.data_cluster_path
        seed = findings.resolved("data_efficiency.seed", config.data_efficiency.seed)
        for name, metric in section.curriculum_metrics.items():
            path = f"{SAMPLING}.curriculum_metrics.{name}"
            metrics.append(
                CurriculumMetric(
                    name,
                    path,
                    _use(name, metric, path, findings),
                    _schedule(metric),
                    metric.difficulty_type == "percentile",
                    metric.index_to_sample_path,
                    metric.index_to_metric_path,
                )
            )
    if not metrics:
        return None
    result = CurriculumPlan(tuple(metrics), index_path, seed)
    _check_cuts(result, config, findings)
    _note_ends(result, config, findings)
    return result


def _schedule(section: Any) -> DifficultySchedule:
    """Of a section without faults; what is missing in a faulty one is filled with anything that is not used."""
    settings = section.schedule_config
    return DifficultySchedule(
        section.schedule_type or "fixed_linear",
        section.min_difficulty if section.min_difficulty is not None else 1,
        section.max_difficulty if section.max_difficulty is not None else 1,
        total_steps=(settings and settings.total_curriculum_step) or 1,
        step_size=(settings and settings.difficulty_step) or 1,
        root_degree=(settings and settings.root_degree) or 1.0,
        difficulties=tuple((settings and settings.difficulty) or ()),
        last_steps=tuple((settings and settings.max_step) or ()),
        deepspeed=section.compat == "deepspeed",
    )


def _use(name: str, metric: Any, path: str, findings: Findings) -> Any:
    """A metric of one single cluster needs no index: something is done with every batch instead of choosing samples."""
    if metric.clustering_type != "single_cluster":
        if name in ("seqlen_truncate", "seqlen_reshape"):
            findings.problem(
                f"{path}.clustering_type",
                f"{name} cuts the sequences of every batch, and so chooses no samples",
                found=metric.clustering_type,
                allowed="single_cluster",
                repair='set "single_cluster", or name the metric seqlen to choose samples by their length',
            )
        return "sample"
    if name not in CUTTING:
        findings.problem(
            f"{path}.clustering_type",
            f"single_cluster chooses no samples by {name}, and there is nothing that the engine could do to a batch "
            "with it",
            found=metric.clustering_type,
            allowed=f"schedule_based, or single_cluster with a metric named {', '.join(CUTTING)}",
        )
        return "sample"
    if metric.difficulty_type == "percentile":
        findings.problem(
            f"{path}.difficulty_type",
            f"{name} is a number of tokens to which sequences are cut, and so no percentile",
            found="percentile",
            allowed="value",
        )
    return CUTTING[name]


def _check_cuts(plan: CurriculumPlan, config: Config, findings: Findings) -> None:
    cutting = [metric for metric in plan.metrics if metric.use != "sample"]
    for metric in cutting[1:]:
        findings.problem(
            metric.path,
            f"sequences are cut by {cutting[0].path} already",
            repair="switch one of the two off",
        )
    for metric in cutting:
        if metric.schedule.minimum < 1:
            findings.problem(
                f"{metric.path}.min_difficulty",
                f"sequences cannot be cut to {metric.schedule.minimum:g} tokens",
                found=metric.schedule.minimum,
                allowed="at least 1",
            )
        if metric.use == "reshape" and config.model is not None:
            _check_pieces(metric, config.data.sequence_length, findings)
    is_sliced = config.sequence_parallel_size > 1 or config.parallel.context_parallel > 1
    if config.sequence_keys is not None and not cutting and not is_sliced:
        findings.note("sequence_keys", "no effect: nothing cuts sequences")


def _check_pieces(metric: CurriculumMetric, length: int, findings: Findings) -> None:
    """Pieces are equally long, so that no token is lost and a batch stays one tensor: their length divides the whole's,
    and may fall short of the difficulty. By more than half is not what was asked for."""
    low = int(metric.schedule.minimum)
    fits = [size for size in range(1, length + 1) if length % size == 0]
    if low < 1 or low >= length or 2 * max(size for size in fits if size <= low) >= low:
        return
    findings.problem(
        f"{metric.path}.min_difficulty",
        f"sequences of {length} tokens (data.sequence_length) cannot be split into equal pieces of about {low}: "
        f"the lengths that divide {length} are {', '.join(map(str, fits))}",
        found=low,
        allowed="a divisor of data.sequence_length",
        repair="choose a sequence length with more divisors, or seqlen_truncate",
    )


def _note_ends(plan: CurriculumPlan, config: Config, findings: Findings) -> None:
    steps = config.training.steps
    for metric in plan.metrics:
        schedule = metric.schedule
        last = schedule.last_steps[-1] + 1 if schedule.last_steps else schedule.total_steps
        if steps is not None and schedule.type != "custom" and last > steps:
            findings.note(
                metric.path, f"the difficulty reaches its maximum at step {last}, after the last one ({steps})"
            )
    if (cutting := plan.cutting) is not None:
        _note_cuts(cutting, config, findings)


def _note_cuts(metric: CurriculumMetric, config: Config, findings: Findings) -> None:
    if config.model is not None and metric.schedule.maximum < config.data.sequence_length:
        findings.note(
            f"{metric.path}.max_difficulty",
            f"the run never sees a whole sequence: {metric.schedule.maximum:g} is below data.sequence_length "
            f"{config.data.sequence_length}",
        )
    if config.fp16.enabled and metric.schedule.type in ("fixed_linear", "fixed_root") and metric.schedule.step_size % 8:
        findings.note(
            f"{metric.path}.schedule_config.difficulty_step",
            f"lengths that are no multiple of 8 ({metric.schedule.step_size}) are slow in fp16 on GPUs",
        )
