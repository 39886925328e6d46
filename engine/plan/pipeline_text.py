"""The stages of a pipeline as text: who holds what, how long it takes, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.plan.estimates import format_bytes
from engine.plan.findings import plural
from engine.plan.forecast import Forecast


def render_stages(made: Forecast, speed: float | None = None) -> str:
    """Two tables, of the stages and of the pipeline ranks. ``speed``: FLOP/s that a rank sustains, for times."""
    return "\n".join([*_stages(made, speed), "", *_ranks(made)])


def _stages(made: Forecast, speed: float | None) -> Iterator[str]:
    pipeline, names = made.pipeline, made.facts.blocks
    assert pipeline is not None
    yield f"Stages of the pipeline ({plural(len(names), 'layer')}); forward and backward are of one micro-batch"
    header = ["stage", "rank", "layers", "parameters"]
    header += ["forward", "backward", "time / mean"] if pipeline.is_measured else []
    header += ["keeps"]
    rows = []
    for stage in pipeline.stages:
        first, end = stage.layers
        name = names[first] if end - first == 1 else f"{names[first]} to {names[end - 1]}"
        row = [str(stage.stage), str(stage.rank), name, f"{stage.parameters:,}"]
        if pipeline.is_measured:
            row += [_time(stage.forward_flops or 0, speed), _time(stage.backward_flops or 0, speed)]
            row += [f"{pipeline.of_mean(stage):.2f}"]
        each = "" if stage.activation_bytes is None else f" x {format_bytes(stage.activation_bytes)}"
        rows.append([*row, f"{stage.micro_batches_held}{each}"])
    yield from _table(header, rows)
    yield "  The first stage has what is in front of the layers as well, the last what is behind them."
    if pipeline.is_measured:
        yield f"  The slowest rank sets the pace: steps take {pipeline.slowest:.2f} times those of an even cut."


def _time(flops: int, speed: float | None) -> str:
    from engine.plan.forecast_text import format_flops

    return format_flops(flops) if speed is None else format_seconds(flops / speed)


def format_seconds(seconds: float) -> str:
    """``1.53 ms``: three digits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _ranks(made: Forecast) -> Iterator[str]:
    yield "Memory of every pipeline rank, and what it sends to others in a step"
    header = ["rank", "parameters", "gradients", "optimizer state", "activations", "in all, up to", "sent"]
    rows = []
    for rank in made.ranks:
        states, kept = rank.states, rank.activations
        sent = sum(each.sent_bytes for each in rank.collectives if each.axis == "pp")
        calls = sum(each.calls for each in rank.collectives if each.axis == "pp")
        rows.append(
            [
                str(rank.rank),
                format_bytes(states.parameters + states.masters),
                format_bytes(states.gradients),
                "unknown" if states.optimizer is None else format_bytes(states.optimizer),
                "unknown" if kept is None else format_bytes(kept.kept),
                "unknown" if rank.high_bytes is None else format_bytes(rank.high_bytes),
                "unknown" if kept is None else f"{calls:,} x, {format_bytes(sent)}",
            ]
        )
    yield from _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Numbers to the right, names (of more than one word or a dot) to the left."""
    widths = [max(len(line[at]) for line in (header, *rows)) for at in range(len(header))]
    left = [header[at] == "layers" for at in range(len(header))]
    for line in (header, *rows):
        cells = (
            cell.ljust(w) if is_left else cell.rjust(w) for cell, w, is_left in zip(line, widths, left, strict=True)
        )
        yield "  " + "  ".join(cells).rstrip()
