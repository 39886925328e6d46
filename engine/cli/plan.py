"""`ptrain plan`: what a config means, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cli.options import Parser, add_config_options, add_world_option, read_config, terminal_columns
from engine.cli.pipeline_picture import describe_pipeline


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "ptrain plan", "Print what a config means for a number of ranks. Needs neither torch nor the ranks."
    )
    parser.add_argument("file", nargs="?", help="the config")
    parser.add_argument("--config", dest="config", help="the config, as in ptrain train")
    add_world_option(parser, 1)
    parser.add_argument("--values", action="store_true", help="every value with its origin, one a line")
    add_config_options(parser)
    arguments = parser.parse_args(argv)
    path = arguments.config or arguments.file
    if path is None:
        parser.error("a config is needed: ptrain plan FILE")

    from engine.plan import imagined_world, plan, render_plan, render_values

    config = read_config(path, arguments.overrides, arguments.lenient, arguments.world)
    resolved = plan(config, imagined_world(config, arguments.world, "--world"))
    print(render_values(resolved) if arguments.values else render_plan(resolved, terminal_columns()))
    if resolved.pipeline is not None and not arguments.values:
        print(describe_pipeline(resolved))
    return 0
