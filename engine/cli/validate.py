"""`ptrain validate`: is a config right, what does it still need, and what does this engine lack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.cli.options import Parser, add_config_options, imagined_world, positive


def run(argv: Sequence[str]) -> int:
    """Exit code 0 for a valid config, also where it needs values or unbuilt features; 2 for an invalid one."""
    parser = Parser("ptrain validate", "Check a config against the schema and for a number of ranks.")
    parser.add_argument("file", help="the config")
    parser.add_argument("--world", type=positive, metavar="N", help="ranks to check for (default: as many as fit)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_options(parser)
    arguments = parser.parse_args(argv)

    from engine.config import examine
    from engine.plan import verdict

    read = examine(arguments.file, overrides=arguments.overrides, lenient=arguments.lenient)
    world = None
    if arguments.world is not None and read.config is not None:
        world = imagined_world(read.config, arguments.world, "--world")
    found = verdict(read, world)
    print(json.dumps(_as_json(found), indent=2) if arguments.json else found.render())
    return found.exit_code


def _as_json(found: Any) -> dict[str, Any]:
    return {
        "verdict": found.kind,
        "problems": [problem.to_json() for problem in found.problems],
        "needs_values": list(found.needs_values),
        "not_built": list(found.not_built),
        "notes": [{"path": note.path, "message": note.message, "line": note.line} for note in found.notes],
    }
