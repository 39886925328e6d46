"""`ptrain diff`: what two configs do differently, in meaning and not in text."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence

from engine.cli.options import Parser, add_config_options, add_world_option, terminal_columns
from engine.contracts import EngineError

TROUBLE = 2


def run(argv: Sequence[str]) -> int:
    """Exit code 0 where both mean the same run, 1 where they differ, 2 for every kind of trouble, as `diff` has it."""
    parser = Parser(
        "ptrain diff",
        "Tell what two configs do differently: not order, spelling or defaults that are written out. "
        "Exit code 0: they mean the same; 1: they differ; 2: one of them cannot be judged.",
    )
    parser.add_argument("first", help="a config")
    parser.add_argument("second", help="the config to compare with it")
    add_world_option(parser)
    parser.add_argument("--model-size", metavar="N", help="parameters, e.g. 1.3b: memory and traffic in bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_options(parser)
    arguments = parser.parse_args(argv)

    from engine.plan import ModelFacts, diff
    from engine.plan.sizes import parse_count

    try:
        size = parse_count(arguments.model_size) if arguments.model_size else None
        found = diff(
            arguments.first,
            arguments.second,
            arguments.world,
            overrides=arguments.overrides,
            lenient=arguments.lenient,
            facts=None if size is None else ModelFacts(size, size),
        )
        print(json.dumps(found.to_json(), indent=2) if arguments.json else found.render(terminal_columns()))
    except (EngineError, BrokenPipeError):
        raise
    except Exception:
        # Exit code 1 would say "they differ".
        print(f"ptrain: {traceback.format_exc().rstrip()}", file=sys.stderr)
        return TROUBLE
    return found.exit_code
