"""`ptrain explain`: what each key of a config does in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.cli.options import Parser, add_config_options, add_world_option, terminal_columns


def run(argv: Sequence[str]) -> int:
    """Exit code 0; 2 for a config with problems, which is explained as far as it can be read."""
    parser = Parser(
        "ptrain explain",
        "Explain a config: what each key does in this run, where its value comes from, and which keys have no effect.",
    )
    parser.add_argument("file", help="the config")
    add_world_option(parser)
    parser.add_argument("--all", action="store_true", help="every key there is, those with defaults too")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every key")
    add_config_options(parser)
    arguments = parser.parse_args(argv)

    from engine.plan import explain

    found = explain(arguments.file, arguments.world, overrides=arguments.overrides, lenient=arguments.lenient)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.render(terminal_columns(), arguments.all))
    return found.verdict.exit_code
