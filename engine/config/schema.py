"""The JSON Schema (draft 2020-12) of a config, made from the sections: completion and hover help in editors.

``python -m engine.config.schema [FILE]`` writes it; without a file it goes to ``schemas/ptrain.schema.json``.
The schema and the sections agree on canonical files: today's spellings, values of their own types, no placeholders.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from engine.config.aliases import CURRENT
from engine.config.auto import automatic_paths
from engine.config.config import Config
from engine.config.places import Path, parse_path
from engine.config.sections.argument_meanings import OWN_CLASS, meaning
from engine.config.sections.arguments import (
    BOOLEANS,
    INTEGERS,
    NOT_NEGATIVE,
    NUMBERS,
    OPTIMIZER_PARAMS,
    PAIRS,
    SCHEDULER_PARAMS,
    TORCH_SCHEDULERS,
)
from engine.config.sections.base import Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILE = pathlib.Path(__file__).parents[2] / "schemas" / "ptrain.schema.json"
COMMENTS = "^(_|//)"
_AUTO = {"$ref": "#/$defs/auto"}


def json_schema() -> dict[str, Any]:
    """The schema as a new dict."""
    made = Config.model_json_schema(ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = made.pop("$defs")
    result: dict[str, Any] = {
        "$schema": DIALECT,
        "$id": "urn:ptrain-engine:config",
        "title": "ptrain configuration",
        "description": "One file describes a training run, in DeepSpeed's format.",
        **{key: value for key, value in made.items() if key not in ("title", "description")},
        "$defs": definitions,
    }
    for definition in (result, *definitions.values()):
        _tidy(definition)
    for section in _sections(Section):
        if section.schema_rules and section.__name__ in definitions:
            definitions[section.__name__]["allOf"] = copy.deepcopy(list(section.schema_rules))
    definitions["auto"] = {
        "const": "auto",
        "description": "Filled in by the caller, or resolved as docs/config.md says.",
    }
    result["properties"]["$schema"] = {"type": "string", "description": "Where editors find this schema."}
    for path in sorted(automatic_paths()):
        _allow_auto(result, parse_path(path))
    _constructor(definitions["OptimizerSection"], OPTIMIZER_PARAMS, ())
    _constructor(definitions["SchedulerSection"], SCHEDULER_PARAMS, TORCH_SCHEDULERS)
    for definition in definitions.values():
        _allow_comments(definition)
    _allow_comments(result)
    for old, new in CURRENT.items():
        parent = _properties(result, old[:-1])
        parent[str(old[-1])] = copy.deepcopy(parent[str(new[-1])])
    return result


def _sections(base: type[Section]) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from _sections(section)


def _tidy(definition: dict[str, Any]) -> None:
    """Leave out the titles that pydantic makes of the names, which tell nothing new."""
    definition.pop("title", None)
    for value in definition.get("properties", {}).values():
        value.pop("title", None)


def _allow_comments(definition: dict[str, Any]) -> None:
    if definition.get("additionalProperties") is False:
        definition["patternProperties"] = {COMMENTS: True}


def _properties(root: dict[str, Any], path: Path) -> dict[str, Any]:
    """The properties of the object at a path."""
    node = root
    for part in path:
        node = _resolve(root, node["properties"][part])
    properties: dict[str, Any] = node["properties"]
    return properties


def _resolve(root: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference, also through "this section or null"."""
    for option in [node, *node.get("anyOf", [])]:
        if option.get("$ref", _AUTO["$ref"]) != _AUTO["$ref"]:
            found: dict[str, Any] = root["$defs"][option["$ref"].rsplit("/", 1)[1]]
            return found
    return node


def _allow_auto(root: dict[str, Any], path: Path) -> None:
    """Let a key also be "auto". Constructor arguments are dealt with by `_constructor`."""
    if "params" in path:
        return
    properties = _properties(root, path[:-1])
    key = str(path[-1])
    field = properties[key]
    outer = {name: field.pop(name) for name in ("description", "default") if name in field}
    options = field.pop("anyOf", None) or [dict(field)]
    properties[key] = {**outer, "anyOf": [*options, _AUTO]}


def _argument(key: str) -> dict[str, Any]:
    """The schema of one constructor argument."""
    bounds = {"minimum": 0} if key in NOT_NEGATIVE else {}
    if key in PAIRS:
        item: dict[str, Any] = {"type": "number"}
        if key == "betas":
            item |= {"minimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [{"type": "array", "items": item, "minItems": 2, "maxItems": 2}, _AUTO]}
    options: list[dict[str, Any]] = [{"type": "null"}, _AUTO]
    if key in BOOLEANS:
        options.insert(0, {"type": "boolean"})
    elif key in INTEGERS:
        options.insert(0, {"type": "integer", **bounds})
    elif key in NUMBERS:
        options.insert(0, {"type": "number", **bounds})
        options.insert(1, {"type": "array", "items": {"type": ["number", "null"]}})
    else:
        return {"enum": ["log", "linear", None, "auto"]} if key == "warmup_type" else {}
    return {"anyOf": options}


def _constructor(definition: dict[str, Any], table: dict[str, tuple[str, ...]], others: tuple[str, ...]) -> None:
    """Tie the arguments in ``params`` to the name in ``type``."""
    properties = definition["properties"]
    names = [*table, *others]
    dotted = {"type": "string", "pattern": r"[.:]", "description": "A class of your own, by its dotted path."}
    properties["type"] = {"description": properties["type"]["description"], "anyOf": [{"enum": names}, dotted]}
    section = "optimizer" if table is OPTIMIZER_PARAMS else "scheduler"
    keys = sorted({key for keys in table.values() for key in keys} | INTEGERS | NUMBERS | BOOLEANS | PAIRS)
    described = {key: {"description": meaning(section, key)} for key in keys if meaning(section, key) != OWN_CLASS}
    arguments = {key: {**described.get(key, {}), **_argument(key)} for key in keys}
    properties["params"]["properties"] = {key: argument for key, argument in arguments.items() if argument}
    properties["params"]["properties"]["max_grad_norm"] = False
    definition["required"] = ["type"]
    definition["allOf"] = [
        {
            "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
            "then": {
                "properties": {"params": {"propertyNames": {"anyOf": [{"enum": list(keys)}, {"pattern": COMMENTS}]}}}
            },
        }
        for name, keys in table.items()
    ]


def render() -> str:
    """The text of the schema file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m engine.config.schema", description="Write the JSON Schema of a config."
    )
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=FILE)
    file: pathlib.Path = parser.parse_args().file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
