"""`ptrain verify-resume`: does a run of this config that stops and resumes equal, to the bit, one that never stopped?

Every part between two stops is a fresh set of processes that ends after saving; only the checkpoint connects them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.options import Parser, add_config_options, positive, read_config, real_world
from engine.cli.scaled import scaled_overrides
from engine.cli.train import base_of, check_can_train, model_and_data
from engine.contracts import EngineError, RunFailed
from engine.launch import RankEnvironment
from engine.launch.threads import thread_environment

if TYPE_CHECKING:
    from engine.config import Config

MIN_STEPS = 4


def run(argv: Sequence[str]) -> int:
    """0: equal. 1: different, or a run failed. 2: the user's mistake."""
    arguments = _parse(argv)
    config, done = _small_config(arguments)
    if arguments.until is not None:
        return _part(arguments, config)
    from engine.cli.resume_verdict import first_difference
    from engine.plan import plan

    environment = RankEnvironment.read()
    if environment.launcher != "single":
        raise EngineError("verify-resume starts its own ranks; call it without torchrun or srun, with --nproc")
    if arguments.build is None:
        check_can_train(config)
    os.environ.update(thread_environment(arguments.nproc or 1))
    world = plan(config, real_world(config, environment, arguments.nproc)).world.size
    for line in done:
        print(line)
    stops = stops_of(arguments.steps)
    print(f"{world} rank{'s' * (world > 1)}, {arguments.steps} steps: straight, and stopped after {_words(stops)}")
    with tempfile.TemporaryDirectory(prefix="ptrain_verify_") as directory:
        folder = Path(directory)
        code = _start(argv, world, folder / "straight", None, arguments.steps)
        for index, until in enumerate((*stops, arguments.steps)):
            if code == 0:
                code = _start(argv, world, folder / f"part{index}", folder / "checkpoints", until)
        if code != 0:
            return code
        straight = _read(folder / "straight", world)
        difference = first_difference(straight, [_read(folder / f"part{i}", world) for i in range(len(stops) + 1)])
    if difference is not None:
        raise RunFailed(f"verify-resume: NOT EQUAL. {difference}")
    last = straight[0][-1]
    print(
        f"EQUAL to the bit: {arguments.steps} steps, {len(last['parameters'])} parameters and buffers, "
        f"{len(last['moments'])} moments, every batch, loss and learning rate"
    )
    return 0


def stops_of(steps: int) -> list[int]:
    """Three stops, none after a simple fraction of the run: of 40 steps after 7, 20 and 33."""
    return sorted({max(1, steps * 7 // 40), steps // 2, min(steps - 1, steps * 33 // 40)})


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "ptrain verify-resume",
        "Train a small version of a config in a temporary folder, once straight and once with stops and fresh "
        "processes, and say whether both are equal to the bit, or what differs first and why.",
    )
    parser.add_argument("config", metavar="CONFIG", help="the config")
    parser.add_argument("--nproc", type=positive, metavar="N", help="ranks (default: all accelerators, else 1)")
    parser.add_argument("--steps", type=_steps, default=12, metavar="N", help="optimizer steps (default 12)")
    parser.add_argument(
        "--build",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that returns the keyword arguments of engine.initialize() but config, as a "
        "dict with model and training_data: for scripts of your own",
    )
    parser.add_argument("--full-size", action="store_true", help="do not make the model small")
    # for the ranks that this command starts
    for name, kind in (("--until", int), ("--trace", Path), ("--checkpoints", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    add_config_options(parser)
    return parser.parse_args(argv)


def _steps(text: str) -> int:
    value = int(text)
    if value < MIN_STEPS:
        raise argparse.ArgumentTypeError(f"{text} is less than {MIN_STEPS}: too few for three stops")
    return value


def _small_config(arguments: argparse.Namespace) -> tuple[Config, list[str]]:
    config = read_config(arguments.config, arguments.overrides, arguments.lenient)
    if arguments.full_size or arguments.build is not None:
        return config, []
    settings, done = scaled_overrides(config)
    if settings:
        config = read_config(arguments.config, [*arguments.overrides, *settings], arguments.lenient)
    return config, done


def _start(argv: Sequence[str], world: int, trace: Path, checkpoints: Path | None, until: int) -> int:
    from engine.launch.elastic import launch

    trace.mkdir()
    more = ["--until", str(until), "--trace", str(trace)]
    if checkpoints is not None:
        more += ["--checkpoints", str(checkpoints)]
    return launch(world, ["verify-resume", *argv, *more])


def _part(arguments: argparse.Namespace, config: Config) -> int:
    """One rank of one part: load if there is something to load, train, save."""
    from engine.cli.failures import explain
    from engine.cli.resume_trace import record
    from engine.entry import initialize
    from engine.launch.signals import end_with_launcher

    end_with_launcher()
    environment = RankEnvironment.read()
    environment.export()
    heard = _Heard()
    log = logging.getLogger("engine")
    log.addHandler(heard)
    log.propagate = False
    parts = _build(arguments.build, config) if arguments.build else _from_config(config)
    model_engine, *_ = initialize(config=config, output=arguments.trace, **parts)
    if model_engine.training_dataloader is None or model_engine.optimizer is None:
        raise EngineError("verify-resume needs training_data and an optimizer, to take steps with")
    try:
        heard.lines.clear()
        resumes = arguments.checkpoints is not None and arguments.checkpoints.exists()
        if resumes:
            model_engine.load_checkpoint(arguments.checkpoints)
        trace = arguments.trace / f"rank{environment.rank}.jsonl"
        record(model_engine, arguments.until, trace, list(heard.lines))
        if arguments.checkpoints is not None:
            model_engine.save_checkpoint(arguments.checkpoints)
    except EngineError:
        raise
    except Exception as error:
        if (failure := explain(error, step=model_engine.global_steps + 1)) is None:
            raise
        raise failure from error
    model_engine.destroy()
    return 0


def _from_config(config: Config) -> dict[str, Any]:
    model, corpus = model_and_data(config)
    return {"model": model, "training_data": corpus.train}


def _build(target: str, config: Config) -> dict[str, Any]:
    import torch

    from engine.cli.target import load_target
    from engine.cli.user_code import describe

    function: Callable[[], Any] = load_target(target, base_of(config))
    torch.manual_seed(config.seed)
    try:
        parts = function()
    except Exception as error:
        raise EngineError(f"--build: {target} failed: {describe(error)}") from error
    if not isinstance(parts, dict) or not {"model", "training_data"} <= set(parts):
        raise EngineError(
            f"--build: {target} returned a {type(parts).__name__}; it must return a dict with model and training_data"
        )
    return parts


class _Heard(logging.Handler):
    """What the engine warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _read(folder: Path, world: int) -> list[list[dict[str, Any]]]:
    return [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()] for rank in range(world)
    ]


def _words(stops: Sequence[int]) -> str:
    return ", ".join(map(str, stops[:-1])) + f" and {stops[-1]}" if len(stops) > 1 else str(stops[0])
