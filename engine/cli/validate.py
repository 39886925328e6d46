"""`ptrain validate`: is a config right, what does it still need, and what does this engine lack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.cli.options import Parser, add_config_options, imagined_world, positive, read_config


def run(argv: Sequence[str]) -> int:
    """Exit code 0 for a valid config, also where it needs values or unbuilt features; 2 for an invalid one."""
    parser = Parser("ptrain validate", "Check a config against the schema and for a number of ranks.")
    parser.add_argument("file", help="the config")
    parser.add_argument("--world", type=positive, default=1, metavar="N", help="ranks to check for (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_options(parser)
    arguments = parser.parse_args(argv)

    from engine.config import ConfigError
    from engine.plan import Verdict, verdict

    try:
        config = read_config(arguments.file, arguments.overrides, arguments.lenient)
    except ConfigError as error:
        found = Verdict("invalid", problems=error.problems)
    else:
        found = verdict(config, imagined_world(config, arguments.world, "--world"))
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
