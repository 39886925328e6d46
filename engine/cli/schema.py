"""`ptrain schema`: the JSON schema of the config, for editors and other tools."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cli.options import Parser


def run(argv: Sequence[str]) -> int:
    Parser("ptrain schema", "Print the JSON schema of the config.").parse_args(argv)

    from engine.config.schema import render

    print(render(), end="")
    return 0
