"""`ptrain schema`: the JSON schema of the config, for editors and other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.cli.options import Parser


def run(argv: Sequence[str]) -> int:
    Parser("ptrain schema", "Print the JSON schema of the config.").parse_args(argv)

    from engine.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
