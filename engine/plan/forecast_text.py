"""A forecast as text: what a rank holds, what it sends, what it computes, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from textwrap import wrap

from engine.plan.capacity import Fit, Option, items_of
from engine.plan.collectives import Collective
from engine.plan.estimates import format_bytes
from engine.plan.findings import plural
from engine.plan.forecast import Forecast
from engine.plan.sizes import format_count

NAMES = {
    "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "send": "send",
    "all_to_all": "all-to-all",
}  # fmt: skip


def render_forecast(made: Forecast, fit: Fit | None, columns: int) -> str:
    """Lines of at most ``columns``, where words allow."""
    lines = [*_memory(made, columns), "", *_collectives(made, columns), "", *_compute(made, columns)]
    if fit is not None:
        lines += ["", *_fit(made, fit, columns)]
    return "\n".join(lines)


def _wrapped(text: str, columns: int, margin: str = "    ") -> list[str]:
    return wrap(text, columns, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def _memory(made: Forecast, columns: int) -> Iterator[str]:
    states, activations, facts = made.states, made.activations, made.facts
    where = f" on pipeline rank {made.pipeline_rank}, the fullest" if made.plan.degrees.pp > 1 else ""
    trainable = facts.num_trainable_parameters
    frozen = "" if trainable == facts.num_parameters else f", {trainable:,} of them trainable"
    blocks = f", {plural(len(facts.blocks), 'block')}" if facts.blocks else ""
    yield from _wrapped(f"Memory of a rank{where} ({facts.num_parameters:,} parameters{frozen}{blocks})", columns)
    rows = [(name, size) for name, size in items_of(made).items() if name not in ("temporaries", "activations")]
    about = "" if states.is_exact else "about "
    for name, size in rows:
        if name == "optimizer state" and states.optimizer is None:
            yield f"  {name:<16} unknown: the optimizer is not one of the engine's"
        elif size or name in ("parameters", "gradients", "optimizer state"):
            yield f"  {name:<16} {about if name == 'optimizer state' else ''}{_bytes(size)}"
    if states.model_states is not None:
        yield f"  {'= model states':<16} {about}{_bytes(states.model_states)}" + (
            "; buffers aside" if states.buffers else ""
        )
    if states.temporary:
        yield from _wrapped(f"  {'temporaries':<16} up to {format_bytes(states.temporary)}: {states.largest_temporary}",
                            columns, " " * 19)  # fmt: skip
    if activations is None:
        yield from _wrapped(
            f"  {'activations':<16} unknown: {facts.why_not_measured or 'not measured'}", columns, " " * 19
        )
    else:
        at_once = f", of {activations.micro_batches} micro-batches" if activations.micro_batches > 1 else ""
        inputs = ", blocks keep their inputs and are computed again" if activations.checkpointed else ""
        span = f"{format_bytes(activations.low)} to {format_bytes(activations.high)}"
        text = f"about {format_bytes(activations.kept)}{at_once}{inputs} ({span}, by kernel and moment)"
        yield from _wrapped(f"  {'activations':<16} {text}", columns, " " * 19)
    low, high = made.low_bytes, made.high_bytes
    if low is not None and high is not None:
        yield f"  {'in all':<16} {format_bytes(low)} to {format_bytes(high)}"


def _bytes(size: int) -> str:
    return f"{format_bytes(size)} ({size:,} bytes)" if size >= 1000 else f"{size} bytes"


def _collectives(made: Forecast, columns: int) -> Iterator[str]:
    if not made.collectives:
        yield "Collectives of a step: none, the rank is alone"
        return
    in_one_bit = made.fullest.in_one_bit
    what = "a step that sends gradients in full" if in_one_bit else "a step"
    yield f"Collectives of {what}, as one rank calls them: {_sent(made.collectives)} sent"
    yield from _table(made.collectives)
    if in_one_bit:
        yield f"Collectives of a step in 1 bit: {_sent(in_one_bit)} sent"
        yield from _table(in_one_bit)


def _sent(collectives: Sequence[Collective]) -> str:
    return format_bytes(sum(collective.sent_bytes for collective in collectives))


def _table(collectives: Sequence[Collective]) -> Iterator[str]:
    rows = [
        (c.axis, NAMES.get(c.operation, c.operation), f"{c.calls:,}", format_bytes(c.sent_bytes), c.purpose)
        for c in collectives
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for axis, operation, calls, sent, purpose in rows:
        row = f"  {axis:<{widths[0]}}  {operation:<{widths[1]}}  {calls:>{widths[2]}} x"
        yield f"{row}  {sent:>{widths[3]}}  {purpose}"


def _compute(made: Forecast, columns: int) -> Iterator[str]:
    compute = made.compute
    tokens = f" ({compute.tokens:,} tokens)" if compute.tokens is not None else ""
    ranks = f", on each of {plural(compute.ranks, 'rank')}" if compute.ranks > 1 else ""
    yield f"Compute of a step of {plural(compute.samples, 'sample')}{tokens}{ranks}"
    rows = [
        ("measured", compute.measured, "matrix products and attention, forward and backward"),
        ("model", compute.model, "6 per parameter and token"),
        ("hardware", compute.hardware, "8 per parameter and token, with every forward computed twice"),
    ]
    for name, flops, meaning in rows:
        if flops is not None:
            yield f"  {name:<16} {format_flops(compute.per_rank(flops)):>11}  {meaning}"


def format_flops(flops: float) -> str:
    """``72 TFLOP``: three digits, powers of 1000."""
    units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]
    while flops >= 999.5 and len(units) > 1:
        flops, units = flops / 1000, units[1:]
    return f"{flops:.3g} {units[0]}"


def _fit(made: Forecast, fit: Fit, columns: int) -> Iterator[str]:
    memory = f"{format_bytes(fit.memory_bytes)}, of which {format_bytes(fit.usable_bytes)} are to use"
    if fit.low_bytes is None or fit.high_bytes is None:
        yield from _wrapped(f"Unknown whether it fits in {memory}: the optimizer's state is not known.", columns)
        return
    unknown = "" if made.activations else " without the activations, which are unknown"
    largest = f"most of it is {fit.largest}, {format_bytes(items_of(made)[fit.largest])}"
    need = f"{format_bytes(fit.low_bytes)} to {format_bytes(fit.high_bytes)}"
    if fit.kind == "fits":
        yield from _wrapped(f"Fits in {memory}: it needs {need}{unknown}; {largest}.", columns)
        return
    over = fit.low_bytes if fit.kind == "does not fit" else fit.high_bytes
    excess = format_bytes(over - fit.usable_bytes)
    verdict = "Does not fit in" if fit.kind == "does not fit" else "May not fit in"
    yield from _wrapped(
        f"{verdict} {memory}: it needs {need}{unknown}, {excess} too much"
        f"{' at the worst moment' if fit.kind == 'may fit' else ''}; {largest}.",
        columns,
    )
    if not fit.options:
        yield from _wrapped("  No smaller micro-batch, later stage or 64 times the ranks would fit.", columns)
    for option in fit.options:
        yield from _wrapped(f"  fits with {describe(option)}: up to {format_bytes(option.high_bytes)}", columns)


def describe(option: Option) -> str:
    """The flags that try an option."""
    flags = [f"--world {option.ranks}"] if option.ranks is not None else []
    flags += [f"--set {path}={json.dumps(value)}" for path, value in option.changes.items()]
    return " ".join(flags) + ("" if option.is_built else " (not built here)")


def describe_size(num_parameters: int) -> str:
    """``7.5 billion parameters``."""
    return f"{format_count(num_parameters)} parameters"
