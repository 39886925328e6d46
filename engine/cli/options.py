"""What the commands have in common: reading the config, and the world it is planned for."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import TYPE_CHECKING

from engine.contracts import EngineError
from engine.launch.signals import LAUNCHER_PID
from engine.plan.plan import World

if TYPE_CHECKING:
    from engine.config import Config
    from engine.launch.environment import RankEnvironment


class Parser(argparse.ArgumentParser):
    """Without abbreviations: `--out` must not come to mean something else when an option is added."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=command, description=description, allow_abbrev=False)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="replace a value of the config, e.g. --set zero_optimization.stage=2; may be repeated",
    )
    parser.add_argument("--lenient", action="store_true", help="unknown keys are notes instead of errors")


def add_world_option(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """``--world``; without a default the config's own sizes say how many ranks they fit."""
    known = "as many as its sizes fit" if default is None else default
    parser.add_argument("--world", type=positive, default=default, metavar="N", help=f"ranks (default: {known})")


def positive(text: str) -> int:
    """An argparse type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def terminal_columns() -> int:
    """How wide a plan is printed: as the terminal, and at most 120."""
    return min(shutil.get_terminal_size((120, 24)).columns, 120)


def read_config(path: str, overrides: list[str], lenient: bool, size: int | None = None) -> Config:
    """Raises ConfigError with everything that is wrong; what the plan finds for ``size`` ranks, or as many as fit, is
    told along."""
    from engine.config import examine
    from engine.plan import usable

    found = examine(path, overrides=overrides, lenient=lenient)
    return usable(found, size)


def real_world(config: Config, environment: RankEnvironment, nproc: int | None) -> World:
    """The ranks that exist, or that are about to be started here: `nproc`, else one per accelerator, else one.

    Raises EngineError where `nproc` contradicts the ranks that exist.
    """
    from engine.device import device_kind

    device, device_count = ("cpu", 0) if config.device == "cpu" else device_kind()
    if environment.launcher != "single":
        if nproc not in (None, environment.world_size):
            raise EngineError(
                f"--nproc is {nproc}, but {environment.launcher} has started {environment.world_size} ranks; "
                f"leave --nproc out"
            )
        how = "--nproc" if LAUNCHER_PID in os.environ else f"{environment.launcher} variables"
        return World(environment.world_size, environment.local_world_size, device, device_count, how)
    if nproc is not None:
        return World(nproc, nproc, device, device_count, "--nproc")
    size = max(device_count, 1)
    how = "one rank per accelerator" if device_count else "no accelerator, no --nproc"
    return World(size, size, device, device_count, how)
