"""Pydantic's verdict on a tree, told as problems with a place, what is allowed, and the repair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from engine.config.config import Config
from engine.config.fields import allowed, choices, members, section_of
from engine.config.messages import Problem, show
from engine.config.places import Path, Places, join_path, step
from engine.config.sections.base import Section
from engine.config.suggest import nearest


def validate(tree: dict[str, Any], places: Places) -> tuple[Config, list[Problem]]:
    """A Config of ``tree``, in which every value that is wrong is left at its default, and what is wrong with those."""
    problems: list[Problem] = []
    while True:
        try:
            return Config.model_validate(tree), problems
        except ValidationError as error:
            wrong = _places_of(error, tree)
            for path, value in wrong.items():
                problems.append(_problem(path, value, places))
                _remove(tree, path)


def _places_of(error: ValidationError, tree: dict[str, Any]) -> dict[Path, Any]:
    """The wrong values by path. Pydantic's locations end in names of union members, which are not part of the path."""
    wrong: dict[Path, Any] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        node: Any = tree
        path: Path = ()
        for part in detail["loc"]:
            try:
                node = step(node, part)
            except LookupError:
                break
            path = (*path, part)
        wrong[path] = node
    shortest = sorted(wrong, key=len)
    return {path: wrong[path] for path in shortest if not any(path[:end] in wrong for end in range(1, len(path)))}


def _remove(tree: dict[str, Any], path: Path) -> None:
    """Take a wrong value out; of a list, the whole list, whose other items mean nothing without it."""
    while isinstance(path[-1], int):
        path = path[:-1]
    node: Any = tree
    for part in path[:-1]:
        node = node[part]
    node.pop(path[-1], None)


def field_at(path: Path) -> tuple[type[BaseModel], FieldInfo] | None:
    """The section and field that a path leads to; a path into a list or a free object gives the field that holds it."""
    model: type[BaseModel] = Config
    found: tuple[type[BaseModel], FieldInfo] | None = None
    for part in path:
        info = model.model_fields.get(part) if isinstance(part, str) else None
        if info is None:
            continue
        found = (model, info)
        inner = section_of(info.annotation)
        if inner is None:
            break
        model = inner
    return found


def _problem(path: Path, value: Any, places: Places) -> Problem:
    file, line, column = places.of_value(path)
    at = field_at(path)
    words = allowed(at[1]) if at else "an object"
    shown = show(value, 40)
    return Problem(
        join_path(places.written(path)),
        f"{shown} is not allowed here",
        "value",
        file,
        line,
        column,
        value,
        words,
        _repair(value, at[1] if at else None),
    )


def _repair(value: Any, info: FieldInfo | None) -> str:
    if info is None:
        return "write an object"
    kinds = members(info.annotation)
    section = section_of(info.annotation)
    if section is not None and issubclass(section, Section) and not isinstance(value, dict | list):
        if value is None:
            return "leave the key out"
        short = section.model_fields.get(section.shorthand)
        kinds_meant = () if short is None else (*members(short.annotation), *map(type, choices(short.annotation)))
        fits = type(value) in kinds_meant
        return f'write {{"{section.shorthand}": {show(value)}}}' if fits else "write an object, or leave the key out"
    if isinstance(value, dict) and str in kinds and len(value) == 1:
        (inner,) = value.values()
        if isinstance(inner, str):
            return f"write {show(inner)}"
    if value is None:
        return "leave the key out for the default" + _default(info)
    if isinstance(value, str) and value.isupper() and len(value) > 2 and value.replace("_", "").isalnum():
        return "is this an unfilled placeholder?"
    if isinstance(value, float) and int in kinds and float not in kinds:
        return "only a whole number can be meant"
    if isinstance(value, str):
        near = nearest(value, [option for option in choices(info.annotation) if isinstance(option, str)])
        if near:
            return f'did you mean "{near}"?'
    return "leave the key out for the default" + _default(info)


def _default(info: FieldInfo) -> str:
    known = info.default_factory is None and info.default is not None and info.default is not PydanticUndefined
    return f", {show(info.default, 30)}" if known else ""


def faults(config: Config, places: Places, unclear: set[str]) -> list[Problem]:
    """Contradictions inside the sections, except about keys that have a problem already or wait for a value."""
    problems = []
    for path, section in _sections(config, ()):
        for fault in section.faults():
            parts: Path = (*path, *fault.key.split("."))
            written = join_path(places.written(parts))
            if any(_is_unclear((*path, *key.split(".")), places, unclear) for key in (fault.key, *fault.depends)):
                continue
            file, line, column = places.of_value(parts)
            found = _value_at(section, fault.key)
            code = fault.code or ("missing-key" if found is None else "conflict")
            at, repair = field_at(parts), fault.repair
            options = (allowed(at[1]),) if at else ()
            if not repair:
                repair = f'add "{parts[-1]}"' if found is None else f"change {parts[-1]}, or leave it out"
            problems.append(
                Problem(written, fault.message, code, file, line, column, found, fault.allowed, repair, options)
            )
    return problems


def _is_unclear(path: Path, places: Places, unclear: set[str]) -> bool:
    spellings = (join_path(places.written(path)), join_path(path))
    return any(_covers(name, spelling) for name in unclear for spelling in spellings)


def _value_at(section: Section, key: str) -> Any:
    """The value that a fault is about, None where there is none. A key may be dotted and lead into free objects."""
    value: Any = section
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _covers(name: str, path: str) -> bool:
    return bool(name) and (
        path == name or path.startswith((name + ".", name + "[")) or name.startswith((path + ".", path + "["))
    )


def _sections(value: Any, path: Path) -> Iterator[tuple[Path, Section]]:
    if isinstance(value, Section):
        yield path, value
        for key in type(value).model_fields:
            yield from _sections(getattr(value, key), (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _sections(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _sections(item, (*path, key))
