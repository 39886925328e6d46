"""`ptrain plan`: what a config means, and what a step of its model takes, without running it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.options import Parser, add_config_options, add_world_option, positive, read_config, terminal_columns
from engine.contracts import EngineError

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan import ModelFacts, Plan
    from engine.plan.forecast import Forecast

DELAY_SECONDS = 2.0
"""Before the progress bar shows."""


def run(argv: Sequence[str]) -> int:
    """Exit code 0, also for features that are not built here and for a model that does not fit."""
    arguments = _parse(argv)
    path = arguments.config or arguments.file

    from engine.plan import imagined_world, render_plan, render_values
    from engine.plan.capacity import imagined_plan, judge
    from engine.plan.forecast import forecast
    from engine.plan.forecast_text import render_forecast
    from engine.plan.resolve import plan as make_plan
    from engine.plan.sizes import parse_bytes

    memory = None if arguments.memory is None else parse_bytes(arguments.memory)
    config = read_config(path, arguments.overrides, arguments.lenient, arguments.world)
    world = imagined_world(config, arguments.world, "--world")
    if arguments.per_node is not None:
        world = replace(world, local_size=arguments.per_node)
    resolved = imagined_plan(config, world) or make_plan(config, world)  # which raises what is wrong
    if arguments.values:
        print(render_values(resolved))
        return 0
    facts = _facts(config, resolved, arguments)
    if facts is not None and arguments.model_size is None:  # the model's own blocks and heads
        resolved = imagined_plan(config, world, facts) or make_plan(config, world, facts)
    made = None if facts is None else forecast(resolved, facts)
    fit = None if made is None or memory is None else judge(made, memory)
    if arguments.svg is not None:
        _draw(resolved, made, arguments.svg)
    if arguments.json:
        known = {"not_built": list(config.not_built), "values": {v.path: v.value for v in resolved.values}}
        known |= {"mesh": resolved.degrees.by_axis, "placement": resolved.degrees.placement}
        known |= {} if made is None else made.to_json()
        print(json.dumps({**known, **({} if fit is None else {"fit": fit.to_json()})}, indent=2))
        return 0
    columns = terminal_columns()
    print(render_plan(resolved, columns))
    if resolved.pipeline is not None:
        _show_pipeline(resolved, made, arguments, columns)
    if config.not_built:
        print(f"valid, not built here: {', '.join(config.not_built)}")
    if made is not None:
        print(f"\n{render_forecast(made, fit, columns)}")
    elif memory is not None:
        raise EngineError("--memory needs a model: set model.target in the config, or give --model-size 7.5b")
    return 0


def _show_pipeline(plan: Plan, made: Forecast | None, arguments: argparse.Namespace, columns: int) -> None:
    """The stages, as far as the model is known, and the schedule."""
    from engine.cli.pipeline_picture import schedule_text, step_seconds
    from engine.plan.pipeline_text import format_seconds, render_stages
    from engine.plan.sizes import parse_count

    stages = None if made is None else made.pipeline
    speed = None if arguments.speed is None else float(parse_count(arguments.speed))
    if made is not None:
        print(f"\n{render_stages(made, speed)}")
    print(f"\n{schedule_text(plan, columns, stages)}")
    if speed is not None and stages is not None and stages.is_measured:
        seconds = step_seconds(plan, stages, speed)
        print(f"Forwards and backwards of a step take {format_seconds(seconds)} at {arguments.speed} FLOP/s on a rank.")


def _draw(plan: Plan, made: Forecast | None, path: Path) -> None:
    from engine.cli.pipeline_picture import write_svg

    if plan.pipeline is None:
        raise EngineError("--svg draws the schedule of a pipeline, and the config has none: set pipeline.stages")
    write_svg(path, plan, None if made is None else made.pipeline)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "ptrain plan",
        "Print what a config means for a number of ranks, and what a step of its model takes on one of them: bytes, "
        "collectives, FLOPs. The model is built without memory; no rank is started.",
    )
    parser.add_argument("file", nargs="?", help="the config")
    parser.add_argument("--config", dest="config", help="the config, as in ptrain train")
    add_world_option(parser, 1)
    parser.add_argument("--per-node", type=positive, metavar="N", help="ranks on a node (default: all on one)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="of one rank, e.g. 80GB: says whether a step fits, and what would"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model-size", metavar="N", help="plan for so many parameters, e.g. 7.5b, in place of the model")
    size.add_argument("--no-model", action="store_true", help="leave the model aside; needs no torch")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the schedule of a pipeline into a file")
    parser.add_argument(
        "--speed", metavar="FLOPS", help="FLOP/s that a rank sustains, e.g. 150T: times in place of FLOPs of stages"
    )
    parser.add_argument("--values", action="store_true", help="every value with its origin, one a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.config is None and arguments.file is None:
        parser.error("a config is needed: ptrain plan FILE")
    return arguments


def _facts(config: Config, resolved: Plan, arguments: argparse.Namespace) -> ModelFacts | None:
    """None where there is no model to know."""
    if arguments.model_size is not None:
        from engine.plan.imagined_model import imagined_facts
        from engine.plan.sizes import parse_count

        return imagined_facts(parse_count(arguments.model_size))
    if arguments.no_model or config.model is None or config.model.target is None:
        return None
    from tqdm import tqdm

    from engine.cli.model_facts import facts_of_target

    with tqdm(total=2, desc="measuring the model", delay=DELAY_SECONDS, leave=False, disable=None) as bar:
        return facts_of_target(config, resolved, bar.update)
