"""What `ptrain plan` shows of a pipeline: the parts of the model on each stage, and a picture of the schedule."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from engine.cli.prepare import base_of

if TYPE_CHECKING:
    from engine.plan import Plan

MAX_MICRO_BATCHES = 16
"""More would not fit a line; a window repeats itself in the middle."""


def describe_pipeline(plan: Plan) -> str:
    """'' without a pipeline. Builds the model that the config names, if any, without values."""
    if plan.pipeline is None:
        return ""
    return "\n".join(["", *_parts(plan), "", *_picture(plan)])


def _parts(plan: Plan) -> list[str]:
    """One line a stage. Raises EngineError where the model cannot be cut so."""
    if plan.config.model is None or plan.config.model.target is None:
        return ["stages: they follow from the model, which the config does not name"]
    import torch

    from engine.cli.target import bind_arguments, build_model, load_target
    from engine.model.blocks import find_blocks
    from engine.model.pipeline.cut import layout_of
    from engine.model.pipeline.layers import describe
    from engine.plan.pipeline_schedules import rank_of_stage

    assert plan.pipeline is not None
    target = load_target(plan.config.model.target, base_of(plan.config))
    with torch.device("meta"):
        model = build_model(target, bind_arguments(target, plan.config.model.args))
    layers, bounds, around = layout_of(model, find_blocks(model, plan.config.model.blocks), plan)
    weights = describe(layers)
    lines = ["stage  rank  layers"]
    last = len(bounds) - 2
    for stage, (first, end) in enumerate(itertools.pairwise(bounds)):
        held = sum(layer.num_parameters for layer in weights[first:end])
        held += (around["first"] + around["both"]) * (stage == 0) + (around["last"] + around["both"]) * (stage == last)
        names = weights[first].name if end - first == 1 else f"{weights[first].name} to {weights[end - 1].name}"
        in_front, behind = around["first"] + around["both"], around["last"] + around["both"]
        ends = ["what is in front of them"] * (stage == 0 and in_front > 0)
        ends += ["what is behind them"] * (stage == last and behind > 0)
        rank = rank_of_stage(plan.pipeline.schedule, plan.degrees.pp, stage)
        lines.append(f"{stage:>5}  {rank:>4}  {' and '.join([names, *ends])}: {held:,} trained parameters")
    return lines


def _picture(plan: Plan) -> list[str]:
    """A line a rank; a column is the time of one forward."""
    from engine.model.pipeline.orders import timeline
    from engine.plan.pipeline_schedules import activations_held

    pipeline = plan.pipeline
    assert pipeline is not None
    number, virtual = min(pipeline.num_micro_batches, MAX_MICRO_BATCHES), pipeline.virtual_stages
    slots = timeline(pipeline.schedule, plan.degrees.pp, virtual, number)
    labels = {slot: f"{slot.action}" if virtual == 1 else f"{slot.action.stage}{slot.action}"
              for rank in slots for slot in rank}  # fmt: skip
    width = max(map(len, labels.values())) + 1
    shown = "" if number == pipeline.num_micro_batches else f" (of {pipeline.num_micro_batches}: the rest is alike)"
    lines = [f"{pipeline.schedule} with {number} micro-batches{shown}; a column is one forward, . is idle"]
    lines.append(
        "F forward, B backward" + ("" if pipeline.schedule in ("gpipe", "1f1b", "interleaved_1f1b") else
        ", I and W its two halves") + ("" if virtual == 1 else "; in front of it the stage")
    )  # fmt: skip
    end = max(rank[-1].end for rank in slots)
    for rank, row in enumerate(slots):
        text, time = "", 0
        for slot in row:
            text += f"{'.':<{width}}" * (slot.start - time) + f"{labels[slot]:<{width}}".ljust(
                width * (slot.end - slot.start)
            )
            time = slot.end
        text += f"{'.':<{width}}" * (end - time)
        held = activations_held(pipeline.schedule, plan.degrees.pp, number, rank)
        tail = "" if held is None else f"| holds {held}"
        lines.append(f"rank {rank} | {text}{tail}".rstrip())
    busy = sum(slot.end - slot.start for rank in slots for slot in rank)
    lines.append(f"idle: {100 * (1 - busy / (end * plan.degrees.pp)):.1f} % of the ranks' time")
    return lines
