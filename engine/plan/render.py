"""The plan as text: a summary for the start of a run, and the full table of values with their origins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

from engine.plan.estimates import estimate_memory, format_bytes
from engine.plan.findings import plural
from engine.plan.layer_drop import describe_layer_drop
from engine.plan.one_bit import describe as describe_one_bit
from engine.plan.pipeline_schedules import bubble_fraction
from engine.plan.placement import axes_in_order, describe_crossings, describe_places
from engine.plan.plan import Origin, Plan
from engine.plan.token_drop import describe_token_drop

MAX_COLUMNS = 120

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")

SHARDED = {
    0: "nothing is sharded, gradients are all-reduced",
    1: "optimizer state is sharded",
    2: "optimizer state and gradients are sharded",
    3: "optimizer state, gradients and parameters are sharded",
}


def render_plan(plan: Plan, columns: int = MAX_COLUMNS) -> str:
    """The plan for people: one line per subject, then what the model takes, then the notes.

    Lines longer than `columns` are broken between words. A value is marked with its origin, [user], [auto] or
    [derived]; one without a mark is a default.
    """
    rows = list(_rows(plan))
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, text in rows:
        margin = " " * (width + 4)
        lines += wrap(f"{label:<{width}}  {text}", columns, subsequent_indent=margin, break_long_words=False)
    if plan.notes:
        lines.append(plural(len(plan.notes), "note"))
        for note in plan.notes:
            lines += wrap(f"  {note.render()}", columns, subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines)


def render_values(plan: Plan) -> str:
    """Every resolved value, one a line: path, value, origin, reason."""
    rows = [(value.path, _show(value.value), value.origin, value.reason) for value in plan.values]
    paths = max((len(row[0]) for row in rows), default=0)
    values = max((len(row[1]) for row in rows), default=0)
    return "\n".join(
        f"{path:<{paths}}  {value:<{values}}  {origin:<7}  {reason}".rstrip() for path, value, origin, reason in rows
    )


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    origins = {value.path: value.origin for value in plan.values}
    yield "world", _world(plan)
    yield "mesh", _mesh(plan)
    for line in (describe_places(plan.degrees), describe_crossings(plan.degrees, plan.world)):
        if line:
            yield "", line
    yield from _pipeline(plan, origins)
    yield from _batch(plan, origins)
    yield from _precision(plan, origins)
    yield from _zero(plan, origins)
    yield from _optimizer(plan, origins)
    yield "schedule", _schedule(plan, origins)
    clipping = f"global norm {_show(plan.gradient_clipping)}" if plan.gradient_clipping else "off"
    yield "clipping", clipping + _mark(origins, "gradient_clipping")
    yield from _curriculum(plan)
    if plan.layer_drop is not None:
        yield "layer drop", describe_layer_drop(plan)
    if plan.token_drop is not None:
        yield "token drop", describe_token_drop(plan)
    yield "run", _run(plan, origins)
    yield "monitors", ", ".join(name for name in MONITORS if getattr(plan.config, name).enabled) or "none"
    yield from _memory(plan)


def _world(plan: Plan) -> str:
    world = plan.world
    nodes = f", {world.local_size} per node" if world.local_size != world.size else ""
    how = f" ({world.how})" if world.how else ""
    return f"{plural(world.size, 'rank')}{how} on {world.device}{nodes}"


def _mesh(plan: Plan) -> str:
    degrees = plan.degrees
    sizes = degrees.by_axis
    used = [f"{axis} {sizes[axis]}" for axis in axes_in_order(degrees.placement) if sizes[axis] > 1]
    order = f", outermost first (placement {degrees.placement})" if len(used) > 1 else ""
    return (" x ".join(used) or "one rank") + order


def _pipeline(plan: Plan, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    pipeline, num_ranks = plan.pipeline, plan.degrees.pp
    if pipeline is None:
        return
    parts = f" of {pipeline.virtual_stages} parts each" if pipeline.virtual_stages > 1 else ""
    bubble = bubble_fraction(pipeline.schedule, num_ranks, pipeline.num_micro_batches, pipeline.virtual_stages)
    idle = f", ranks idle {100 * bubble:.1f} % of a step where stages take equally long"
    yield (
        "pipeline",
        f"{plural(num_ranks, 'rank')}{parts}, {pipeline.schedule}{_mark(origins, 'pipeline.schedule')}, "
        f"{pipeline.num_micro_batches} micro-batches, cut by {_show(pipeline.partition)}"
        f"{_mark(origins, 'pipeline.partition')}{idle}",
    )


def _batch(plan: Plan, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    batch = plan.batch
    total = f"{plural(batch.global_batch_size, 'sample')}{_mark(origins, 'train_batch_size')}"
    micro = f"{batch.micro_batch_size} micro{_mark(origins, 'train_micro_batch_size_per_gpu')}"
    accumulation = f"{batch.accumulation_steps} accumulation{_mark(origins, 'gradient_accumulation_steps')}"
    yield "batch", f"{total} = {micro} x {accumulation} x {plan.degrees.dp} dp"


def _precision(plan: Plan, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    precision = plan.precision
    compute = f"{precision.compute}, autocast to {precision.autocast}" if precision.autocast else precision.compute
    masters = ", fp32 masters" if precision.compute != "fp32" else ""
    overflow = "" if precision.check_overflow else "; non-finite gradients are applied"
    yield "precision", f"{compute}{masters}{overflow}"
    yield (
        "gradients",
        f"accumulated in {precision.accumulate}{_mark(origins, 'data_types.grad_accum_dtype')}, "
        f"reduced in {precision.reduce}{_mark(origins, 'communication_data_type')} to their {plan.zero.reduce_op}"
        + (f", divided by {plan.zero.predivide_factor:g} beforehand" if plan.zero.predivide_factor != 1 else ""),
    )
    scale = precision.loss_scale
    if scale.dynamic:
        consecutive = "consecutive " if scale.consecutive_hysteresis else ""
        yield (
            "loss scale",
            f"dynamic from {scale.initial:.0f}, doubled after {scale.window_steps} clean steps, "
            f"{consecutive}hysteresis {scale.hysteresis}, at least {scale.minimum:g}",
        )
    elif scale.static != 1.0:
        yield "loss scale", f"fixed at {scale.static:g}{_mark(origins, 'fp16.loss_scale')}"


def _zero(plan: Plan, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    zero = plan.zero
    over = f" over {plural(plan.shard_size, 'rank')}" if zero.stage else ""
    replicas = f" in {plan.degrees.dp_replicate} replicas" if zero.stage and plan.degrees.dp_replicate > 1 else ""
    yield (
        "zero",
        f"stage {zero.stage}{_mark(origins, 'zero_optimization.stage')}: {SHARDED[zero.stage]}{over}{replicas}",
    )
    if plan.degrees.dp == 1:
        return
    if zero.stage < 3:
        mark = _mark(origins, "zero_optimization.reduce_bucket_size")
        yield "", f"gradients travel in buckets of {zero.bucket_elements:,} elements{mark}"
        return
    mark = _mark(origins, "zero_optimization.prefetch_bucket_size")
    yield "", f"blocks are gathered in groups of {zero.group_elements:,} elements{mark}"
    if zero.reshard_after_forward is not True:
        yield "", f"after forward, parameters stay sharded over {zero.reshard_after_forward} ranks"


def _optimizer(plan: Plan, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    optimizer = plan.optimizer
    if optimizer is None:
        yield "optimizer", "none in the config: passed to initialize()"
        return
    groups = {key: value for key, value in optimizer.params.items() if isinstance(value, dict)}
    if optimizer.type == "Muon" and groups:
        yield "optimizer", f"Muon for matrices: {_params(groups['muon'], {}, '')}"
        yield "", f"Adam for the rest: {_params(groups['adam'], {}, '')}"
        return
    params = _params(optimizer.params, origins, "optimizer.params.")
    yield "optimizer", f"{optimizer.type}{': ' if params else ''}{params}"
    for line in describe_one_bit(optimizer, plan.degrees, plan.precision, plan.config.training.steps):
        yield "", line


def _schedule(plan: Plan, origins: Mapping[str, Origin]) -> str:
    schedule = plan.schedule
    if schedule is None:
        return "none in the config: a constant learning rate, or the scheduler passed to initialize()"
    params = {key: "the optimizer's lr" if value is None and key == "warmup_max_lr" else value
              for key, value in schedule.params.items()}  # fmt: skip
    text = _params(params, origins, "scheduler.params.")
    return f"{schedule.type}{': ' if text else ''}{text}"


def _curriculum(plan: Plan) -> Iterator[tuple[str, str]]:
    uses = {
        "truncate": "sequences are cut to {} tokens",
        "reshape": "sequences are split into pieces of {} tokens",
        "sample": "samples are drawn up to {}",
    }
    label = "curriculum"
    for metric in plan.curriculum.metrics if plan.curriculum is not None else ():
        schedule = metric.schedule
        growth = f"{schedule.minimum:g} to {schedule.maximum:g}{' percentiles' if metric.percentile else ''}"
        last = schedule.last_steps[-1] + 1 if schedule.last_steps else schedule.total_steps
        pace = "custom" if schedule.type == "custom" else f"{schedule.type}, the maximum from step {last} on"
        yield label, f"{metric.name}: {uses[metric.use].format(growth)} ({pace})"
        label = ""


def _run(plan: Plan, origins: Mapping[str, Origin]) -> str:
    training = plan.config.training
    parts = [f"seed {plan.seed}{_mark(origins, 'seed')}"]
    if training.steps is not None:
        parts.insert(0, plural(training.steps, "step"))
    elif training.num_epochs is not None:
        parts.insert(0, f"{training.num_epochs:g} epochs")
    return ", ".join(parts)


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    facts = plan.facts
    if facts is None:
        return
    trainable = facts.num_trainable_parameters
    frozen = "" if trainable == facts.num_parameters else f", {trainable:,} of them trainable"
    blocks = f", {len(facts.blocks)} blocks" if facts.blocks else ""
    yield "model", f"{facts.num_parameters:,} parameters{frozen}{blocks}"
    estimate = estimate_memory(plan, facts)
    optimizer = "unknown" if estimate.optimizer_bytes is None else format_bytes(estimate.optimizer_bytes)
    gathered = f", {format_bytes(estimate.gathered_bytes)} gathered blocks" if estimate.gathered_bytes else ""
    total = "" if estimate.total_bytes is None else f"{format_bytes(estimate.total_bytes)} = "
    parts = plan.degrees.tp * plan.degrees.pp
    if_equal = "" if parts == 1 else f", if the {parts} parts of the model are equal"
    yield (
        "memory",
        f"per rank {total}{format_bytes(estimate.parameter_bytes)} parameters, "
        f"{format_bytes(estimate.gradient_bytes)} gradients, {optimizer} optimizer state{gathered}{if_equal}; "
        "activations come on top",
    )


def _params(params: Mapping[str, Any], origins: Mapping[str, Origin], prefix: str) -> str:
    return ", ".join(
        f"{key} {_show(value)}{_mark(origins, prefix + key)}" for key, value in params.items() if value is not None
    )


def _mark(origins: Mapping[str, Origin], path: str) -> str:
    origin = origins.get(path, "default")
    return "" if origin == "default" else f" [{origin}]"


def _show(value: Any) -> str:
    """A value as JSON would spell it; tuples as lists."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    return str(value)
