"""`ptrain validate`: is a config right, what does it still need, and what does this engine lack."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.cli.options import Parser, add_config_options, add_world_option


def run(argv: Sequence[str]) -> int:
    """Exit code 0 for a valid config, also where it needs values or unbuilt features; 2 for an invalid one."""
    parser = Parser(
        "ptrain validate",
        "Check a config: every problem at once, each with its line, what was found, what is allowed and the repair.",
    )
    parser.add_argument("file", help="the config")
    add_world_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_options(parser)
    arguments = parser.parse_args(argv)

    from engine.plan import validate

    found = validate(arguments.file, arguments.world, overrides=arguments.overrides, lenient=arguments.lenient)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.render())
    return found.exit_code
