"""`ptrain lr-range`: train with a learning rate that rises until the loss diverges, and say what range to use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.options import Parser, add_config_options, positive, read_config, real_world
from engine.cli.pictures import MISSING, draw_range, have_matplotlib
from engine.cli.prepare import check_has_model
from engine.contracts import EngineError, RunFailed
from engine.launch import RankEnvironment
from engine.launch.threads import thread_environment

if TYPE_CHECKING:
    from engine.config import Config

MIN_LR, MAX_LR, NUM_STEPS = 1e-7, 10.0, 100
"""Of the test that stands in where the config's schedule is no LRRangeTest."""


@dataclass(frozen=True)
class RangeTest:
    """``schedule(optimizer)`` makes the schedule; None leaves the config's own LRRangeTest in place."""

    num_steps: int
    schedule: Callable[[Any], Any] | None
    described: str
    is_log: bool


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "ptrain lr-range",
        "Train with a rising learning rate until the loss diverges, and suggest a range. The config's own LRRangeTest "
        "is run if it has one, else an exponential one. Saves no model.",
    )
    parser.add_argument("file", nargs="?", help="the config")
    parser.add_argument("--config", dest="config", help="the config, as in ptrain train")
    parser.add_argument("--nproc", type=positive, metavar="N", help="ranks on this machine")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where lr_range.png and lr_range.json are written")
    parser.add_argument("--steps", type=positive, metavar="N", help=f"steps to take at most (default {NUM_STEPS})")
    parser.add_argument("--min-lr", type=float, metavar="LR", help=f"where to begin (default {MIN_LR:g})")
    parser.add_argument("--max-lr", type=float, metavar="LR", help=f"where to end (default {MAX_LR:g})")
    add_config_options(parser)
    arguments = parser.parse_args(argv)
    path = arguments.config or arguments.file
    if path is None:
        parser.error("a config is needed: ptrain lr-range FILE")

    from engine.cli.train import check_output
    from engine.plan import plan
    from engine.plan.render import MONITORS

    # A test is no run to be watched.
    quiet = [f"{monitor}.enabled=false" for monitor in MONITORS]
    config = read_config(path, [*arguments.overrides, *quiet], arguments.lenient)
    check_has_model(config)
    environment = RankEnvironment.read()
    os.environ.update(thread_environment(arguments.nproc or environment.local_world_size))
    output = arguments.output or Path("output") / Path(path).stem
    test = range_test(config, arguments.steps, arguments.min_lr, arguments.max_lr)
    resolved = plan(config, real_world(config, environment, arguments.nproc))
    check_output(output)
    if environment.launcher == "single" and resolved.world.size > 1:
        from engine.launch.elastic import launch

        return launch(resolved.world.size, ["lr-range", *argv])
    environment.export()
    logging.basicConfig(format="ptrain: %(message)s")
    return _work(config, test, output, is_first=environment.rank == 0)


def range_test(config: Config, steps: int | None, min_lr: float | None, max_lr: float | None) -> RangeTest:
    """The config's LRRangeTest, or an exponential one. Raises EngineError for bounds that are none."""
    scheduler = config.scheduler
    if scheduler is not None and scheduler.type == "LRRangeTest":
        if min_lr is not None or max_lr is not None:
            raise EngineError(
                "--min-lr and --max-lr belong to a test that is made up; the config has its own LRRangeTest: change "
                "scheduler.params, or leave them out"
            )
        size = scheduler.params.get("lr_range_test_step_size", 2000)
        num_steps = steps or config.training.steps or 5 * size
        is_log = scheduler.params.get("lr_range_test_growth") == "exponential"
        return RangeTest(num_steps, None, "the config's LRRangeTest", is_log)
    low, high, num_steps = min_lr or MIN_LR, max_lr or MAX_LR, steps or NUM_STEPS
    if not 0 < low < high or num_steps < 10:
        raise EngineError(
            f"a range test goes from a learning rate above 0 to a higher one in at least 10 steps; "
            f"it would go from {low:g} to {high:g} in {num_steps}: change --min-lr, --max-lr or --steps"
        )

    def schedule(optimizer: Any) -> Any:
        from engine.optim.schedules import LRRangeTest

        return LRRangeTest(
            optimizer,
            lr_range_test_min_lr=low,
            lr_range_test_step_size=num_steps - 1,
            lr_range_test_step_rate=high / low - 1.0,
            lr_range_test_growth="exponential",
        )

    return RangeTest(num_steps, schedule, f"lr from {low:g} to {high:g} in {num_steps} steps, exponentially", True)


def _work(config: Config, test: RangeTest, output: Path, is_first: bool) -> int:
    from engine.cli.range_curve import RangeCurve
    from engine.cli.train import model_and_data
    from engine.entry import initialize
    from engine.watch.summary import write_json

    model, corpus = model_and_data(config)
    model_engine, *_ = initialize(model=model, config=config, training_data=corpus.train, lr_scheduler=test.schedule)
    curve = RangeCurve()
    if is_first:
        print(f"lr-range: {test.described}", flush=True)
    for step in range(1, test.num_steps + 1):
        try:
            model_engine.train_batch()
        except RunFailed as error:
            # What ends a training run (no finite loss at all, skips in a row) ends a range test as intended.
            curve.stopped = f"step {step}: {error}"
        report = model_engine.last_report
        if report is not None and report.step == step:
            curve.add(report.lr, report.loss)
        if curve.stopped:
            break
        if is_first and step % max(1, test.num_steps // 10) == 0:
            print(f"step {step}: lr {curve.lrs[-1]:.3g}, loss {curve.losses[-1]:.4f}", flush=True)
    model_engine.destroy()
    if is_first:
        result = curve.result(test.num_steps)
        write_json(output / "lr_range.json", {"test": test.described, **result})
        print(curve.told())
        if have_matplotlib() and curve.smoothed:
            title = f"learning-rate range test of {Path(config.source or 'config').name}"
            picture = output / "lr_range.png"
            draw_range(picture, title, curve.lrs, curve.losses, curve.smoothed, curve.suggested(), test.is_log)
            print(f"written to {output}: lr_range.json, lr_range.png")
        else:
            print(f"written to {output}: lr_range.json" + ("" if have_matplotlib() else f"; no picture: {MISSING}"))
    return 0
