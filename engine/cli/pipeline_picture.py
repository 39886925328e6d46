"""What `ptrain plan` draws of a pipeline: which rank computes what when, as text and as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from engine.contracts import EngineError

if TYPE_CHECKING:
    from engine.model.pipeline.orders import Action, Slot
    from engine.plan import Plan
    from engine.plan.pipeline_forecast import PipelineForecast

MAX_MICRO_BATCHES = 16
"""More would not fit a picture; a window repeats itself in the middle."""

FILL = {"F": "#4878a8", "B": "#5aa469", "I": "#e0a030", "W": "#b55a4a"}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
INK, PALE, GRID = "#222222", "#f4f4f4", "#cccccc"
ROW, LEFT, TOP, BOTTOM, MIN_BOX, MAX_WIDTH = 34, 92, 64, 40, 22, 1800
"""Pixels."""


def schedule_text(plan: Plan, columns: int, stages: PipelineForecast | None = None) -> str:
    """A line a rank; a column is the time of one forward. Wider pictures go on below."""
    from engine.model.pipeline.orders import idle_fraction, most_held, orders, timeline

    pipeline = plan.pipeline
    assert pipeline is not None
    number, num_ranks, virtual = _shown(plan), plan.degrees.pp, pipeline.virtual_stages
    slots = timeline(pipeline.schedule, num_ranks, virtual, number)
    rows = [list(_cells(row, virtual)) for row in slots]
    width = max(len(cell) for row in rows for cell in row) + 1
    end = max(map(len, rows))
    title = f"{pipeline.schedule} with {number} micro-batches{_of(plan)}; a column is one forward, . is idle"
    example = "F3: of micro-batch 3" if virtual == 1 else "2F3: on stage 2, of micro-batch 3"
    lines = [*wrap(title, columns), *wrap(f"{_letters(slots)}; {example}", columns)]
    label = len(f"rank {num_ranks - 1} | ")
    fit = max((columns - label) // width, 1)
    for start in range(0, end, fit):
        lines += [""] * (start > 0)
        for rank, row in enumerate(rows):
            part = [*row, *["."] * (end - len(row))][start : start + fit]
            lines.append(f"rank {rank} | {''.join(f'{cell:<{width}}' for cell in part)}".rstrip())
    whole = timeline(pipeline.schedule, num_ranks, virtual, pipeline.num_micro_batches)
    idle = f"Ranks idle {100 * idle_fraction(whole):.1f} % of a step where stages take equally long"
    if stages is not None and stages.is_measured:
        by_flops = timeline(pipeline.schedule, num_ranks, virtual, pipeline.num_micro_batches, _by_flops(stages))
        idle += f", {100 * idle_fraction(by_flops):.1f} % as these stages' FLOPs go"
    held = [most_held(order) for order in orders(pipeline.schedule, num_ranks, virtual, pipeline.num_micro_batches)]
    passages = "micro-batches" if virtual == 1 else "micro-batches (counted in each part)"
    kept = f"The ranks keep at most {', '.join(map(str, held))} {passages}."
    return "\n".join([*lines, *wrap(f"{idle}.", columns), *wrap(kept, columns)])


def step_seconds(plan: Plan, stages: PipelineForecast, speed: float) -> float:
    """Of forwards and backwards at ``speed`` FLOP/s on each rank; transfers and the optimizer aside."""
    from engine.model.pipeline.orders import timeline

    pipeline = plan.pipeline
    assert pipeline is not None
    number = pipeline.num_micro_batches
    slots = timeline(pipeline.schedule, plan.degrees.pp, pipeline.virtual_stages, number, _by_flops(stages))
    return max(row[-1].end for row in slots) / speed


def write_svg(path: Path, plan: Plan, stages: PipelineForecast | None = None) -> None:
    """Raises EngineError where the file cannot be written."""
    if path.suffix.lower() != ".svg":
        raise EngineError(f"--svg: {path} is no SVG; name a file that ends in .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(schedule_svg(plan, stages), "utf-8")
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error


def schedule_svg(plan: Plan, stages: PipelineForecast | None = None) -> str:
    """Boxes as wide as their time: by the stages' FLOPs where they are known, else as if stages were alike."""
    from engine.model.pipeline.orders import idle_fraction, one_forward, timeline

    pipeline = plan.pipeline
    assert pipeline is not None
    is_measured = stages is not None and stages.is_measured
    duration = _by_flops(stages) if stages is not None and is_measured else one_forward
    slots = timeline(pipeline.schedule, plan.degrees.pp, pipeline.virtual_stages, _shown(plan), duration)
    end = max(row[-1].end for row in slots)
    shortest = min(slot.end - slot.start for row in slots for slot in row)
    scale = min(MIN_BOX / shortest, MAX_WIDTH / end)
    width, height = round(LEFT + end * scale + 16), TOP + ROW * len(slots) + BOTTOM
    title = f"{pipeline.schedule}: {len(slots)} ranks, {_shown(plan)} micro-batches{_of(plan)}, idle "
    title += f"{100 * idle_fraction(slots):.1f} %" + (", widths by FLOPs" if is_measured else "")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 640)}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><title>{escape(title)}</title>',
        f'<text x="12" y="22" font-size="15" fill="{INK}">{escape(title)}</text>',
        *_legend(slots),
    ]
    for rank, row in enumerate(slots):
        top = TOP + ROW * rank
        own = ", ".join(str(stage) for stage in sorted({slot.action.stage for slot in row}))
        parts.append(f'<text x="12" y="{top + 14}" fill="{INK}">rank {rank}</text>')
        parts.append(
            f'<text x="12" y="{top + 27}" font-size="10" fill="#666666">stage{"s" * ("," in own)} {own}</text>'
        )
        parts.append(_rect(LEFT, top, end * scale, PALE))
        for slot in row:
            parts += _box(
                slot, LEFT + slot.start * scale, top, (slot.end - slot.start) * scale, pipeline.virtual_stages
            )
    axis = TOP + ROW * len(slots) + 6
    parts.append(f'<line x1="{LEFT}" y1="{axis}" x2="{LEFT + end * scale:.1f}" y2="{axis}" stroke="{GRID}"/>')
    inside = "micro-batches" if pipeline.virtual_stages == 1 else "stage:micro-batch"
    parts.append(f'<text x="{LEFT}" y="{axis + 16}" fill="#666666">time; numbers are {inside}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(slot: Slot, left: float, top: int, width: float, virtual_stages: int) -> Iterator[str]:
    action = slot.action
    tip = f"{NAMES[action.kind]} of micro-batch {action.micro_batch} on stage {action.stage}"
    yield _rect(left, top, width, FILL[action.kind], tip)
    label = f"{action.micro_batch}" if virtual_stages == 1 else f"{action.stage}:{action.micro_batch}"
    if 6 * len(label) < width:
        yield (
            f'<text x="{left + width / 2:.1f}" y="{top + 19}" text-anchor="middle" font-size="11" fill="white">'
            f"{label}</text>"
        )


def _rect(left: float, top: int, width: float, fill: str, tip: str = "") -> str:
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 6}" fill="{fill}" stroke="white" '
        f'stroke-width="1">{inside}</rect>'
    )


def _legend(slots: Sequence[Sequence[Slot]]) -> Iterator[str]:
    left = LEFT
    for kind in _kinds(slots):
        yield f'<rect x="{left}" y="36" width="14" height="14" fill="{FILL[kind]}"/>'
        yield f'<text x="{left + 20}" y="48" fill="{INK}">{NAMES[kind]}</text>'
        left += 40 + 7 * len(NAMES[kind])
    yield f'<rect x="{left}" y="36" width="14" height="14" fill="{PALE}" stroke="{GRID}"/>'
    yield f'<text x="{left + 20}" y="48" fill="{INK}">idle</text>'


def _kinds(slots: Sequence[Sequence[Slot]]) -> list[str]:
    there = {slot.action.kind for row in slots for slot in row}
    return [kind for kind in FILL if kind in there]


def _letters(slots: Sequence[Sequence[Slot]]) -> str:
    return ", ".join(f"{kind} {NAMES[kind]}" for kind in _kinds(slots))


def _cells(row: Sequence[Slot], virtual_stages: int) -> Iterator[str]:
    """One string for each unit of time until the rank has done all."""
    time = 0
    for slot in row:
        yield from ["."] * (round(slot.start) - time)
        stage = "" if virtual_stages == 1 else str(slot.action.stage)
        yield f"{stage}{slot.action}"
        yield from [""] * (round(slot.end - slot.start) - 1)
        time = round(slot.end)


def _shown(plan: Plan) -> int:
    assert plan.pipeline is not None
    return min(plan.pipeline.num_micro_batches, MAX_MICRO_BATCHES)


def _of(plan: Plan) -> str:
    assert plan.pipeline is not None
    number = plan.pipeline.num_micro_batches
    return "" if number == _shown(plan) else f" (of {number}: the rest is alike)"


def _by_flops(stages: PipelineForecast) -> Callable[[Action], float]:
    """How long an action takes if time goes with FLOPs; each half of a backward takes half of it."""
    forward = [float(stage.forward_flops or 0) for stage in stages.stages]
    backward = [float(stage.backward_flops or 0) for stage in stages.stages]

    def duration(action: Action) -> float:
        if action.kind == "F":
            return forward[action.stage]
        return backward[action.stage] * (1.0 if action.kind == "B" else 0.5)

    return duration
