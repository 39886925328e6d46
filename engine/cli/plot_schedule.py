"""`ptrain plot-schedule`: what changes during a run, drawn before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.options import Parser, add_config_options, positive, read_config
from engine.cli.pictures import check_picture, draw_curves, require_matplotlib
from engine.contracts import EngineError

if TYPE_CHECKING:
    import torch

    from engine.plan import Plan

DEFAULT_LR = 1e-3
"""Of the optimizer that stands in where the config names none."""


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "ptrain plot-schedule",
        "Draw learning rate, momentum, batch, difficulty, kept tokens and layer drop's theta over the steps of a run, "
        "without it.",
    )
    parser.add_argument("file", nargs="?", help="the config")
    parser.add_argument("--config", dest="config", help="the config, as in ptrain train")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.png", help="the picture (default: output/CONFIG/schedule.png)"
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="steps to draw (default: training.steps)")
    parser.add_argument("--world", type=positive, default=1, metavar="N", help="ranks to plan for (default 1)")
    add_config_options(parser)
    arguments = parser.parse_args(argv)
    path = arguments.config or arguments.file
    if path is None:
        parser.error("a config is needed: ptrain plot-schedule FILE")
    require_matplotlib()
    output = arguments.output or Path("output") / Path(path).stem / "schedule.png"
    check_picture(output)

    from engine.plan import imagined_world, plan

    config = read_config(path, arguments.overrides, arguments.lenient)
    resolved = plan(config, imagined_world(config, arguments.world, "--world"))
    num_steps = arguments.steps or config.training.steps or _length(resolved)
    if num_steps is None:
        raise EngineError(f"{path}: how many steps there are is not known; pass --steps N, or set training.steps")
    curves = schedule_curves(resolved, num_steps)
    draw_curves(output, f"{Path(path).name}: {num_steps:,} steps", range(1, num_steps + 1), curves)
    for name, values in curves.items():
        print(f"{name}: {values[0]:.4g} at step 1, {values[-1]:.4g} at step {num_steps}, {_span(values)}")
    print(f"written to {output}")
    return 0


def schedule_curves(plan: Plan, num_steps: int) -> dict[str, list[float]]:
    """The value that each of the steps 1 to ``num_steps`` runs with, by name; what the config does not use is left out.

    Found by moving the run's own schedules, not by formulas of their own. The lr is that of the first parameter group.
    """
    curves: dict[str, list[float]] = {"lr": []}
    lrs, momenta, tokens = [], [], []
    difficulties: dict[str, list[float]] = {}
    optimizer, schedule = _dummy(plan)
    seen = 0
    for step in range(1, num_steps + 1):
        group = optimizer.param_groups[0]
        lrs.append(float(group["lr"]))
        momenta.append(float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0)))
        length = plan.config.data.sequence_length
        for name, value, cut in _difficulties(plan, step, length):
            difficulties.setdefault(name, []).append(value)
            length = cut
        tokens.append(float(length * plan.batch.global_batch_size))
        seen += length * plan.batch.global_batch_size
        if hasattr(schedule, "see_tokens"):
            schedule.see_tokens(seen)
        optimizer.step()
        schedule.step()
    curves["lr"] = lrs
    if any(momenta):
        curves["momentum"] = momenta
    curves["batch, samples"] = [float(plan.batch.global_batch_size)] * num_steps
    if plan.curriculum is not None and plan.curriculum.cutting is not None:
        splits = plan.curriculum.cutting.use == "reshape"
        curves["batch, tokens"] = [tokens[0]] * num_steps if splits else tokens
    curves |= difficulties
    if plan.layer_drop is not None:
        from engine.plan.layer_drop import theta_in

        curves["theta"] = [theta_in(plan.layer_drop, step, step) for step in range(num_steps)]
    if plan.token_drop is not None:
        from engine.data.curriculum import difficulty_at

        most = plan.config.data.sequence_length if plan.config.model is not None else math.inf
        kept = [float(difficulty_at(plan.token_drop.schedule, step)) for step in range(num_steps)]
        curves["kept tokens"] = [min(count, most) for count in kept]
    return curves


def _dummy(plan: Plan) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer of the config's kind over one number, and the run's schedule on it."""
    import torch

    from engine.optim.schedule_factory import build_schedule

    params = dict(plan.optimizer.params) if plan.optimizer is not None else {}
    lr = params.get("lr")
    parameter = torch.nn.Parameter(torch.zeros(1))
    rate = float(lr) if isinstance(lr, int | float) else DEFAULT_LR
    if plan.optimizer is not None and "betas" not in params and "momentum" in params:
        optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter], lr=rate, momentum=params["momentum"])
    else:
        betas = tuple(params.get("betas") or (0.9, 0.999))
        optimizer = torch.optim.AdamW([parameter], lr=rate, betas=betas)
    schedule = plan.schedule
    if schedule is not None:
        # A list has one number per parameter group; the first group is drawn.
        first = {key: value[0] if _is_per_group(value) else value for key, value in schedule.params.items()}
        schedule = replace(schedule, params=first)
    return optimizer, build_schedule(schedule, optimizer)


def _is_per_group(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, int | float) for entry in value)


def _difficulties(plan: Plan, step: int, length: int) -> list[tuple[str, float, int]]:
    """Name, difficulty and the tokens that a sequence has by it, of every metric that JSON describes."""
    from engine.data.curriculum import difficulty_at
    from engine.data.sequences import piece_length

    found = []
    for metric in plan.curriculum.metrics if plan.curriculum is not None else ():
        if metric.schedule.type == "custom":
            continue
        difficulty = float(difficulty_at(metric.schedule, step))
        if metric.use == "reshape":
            difficulty = float(piece_length(length, int(difficulty)))
        cut = min(length, int(difficulty)) if metric.use == "truncate" else length
        found.append((metric.name, difficulty, cut))
    return found


def _length(plan: Plan) -> int | None:
    """Of the longest thing that has an end, where the config does not say how long the run is."""
    params = plan.schedule.params if plan.schedule is not None else {}
    first = params.get("cycle_first_step_size")
    lengths = [
        params.get("total_num_steps"),
        None if first is None else first + (params.get("cycle_second_step_size") or first),
        2 * params["warmup_num_steps"] if params.get("warmup_num_steps") else None,
        5 * params["lr_range_test_step_size"] if "lr_range_test_step_size" in params else None,
    ]
    lengths += [
        max(metric.schedule.total_steps, *metric.schedule.last_steps, 1)
        for metric in (plan.curriculum.metrics if plan.curriculum is not None else ())
    ]
    if plan.layer_drop is not None and plan.layer_drop.gamma:
        lengths.append(round(5 / plan.layer_drop.gamma))
    if plan.token_drop is not None:
        lengths.append(plan.token_drop.schedule.total_steps)
    known = [length for length in lengths if isinstance(length, int) and length > 1]
    return max(known, default=None)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return "constant" if low == high else f"between {low:.4g} and {high:.4g}"
