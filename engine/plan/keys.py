"""Every key of a config with its effective value and its description: what `explain` and `diff` go through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_origin

from engine.config.fields import members, section_of
from engine.config.places import Path, join_path
from engine.config.sections.argument_meanings import meaning
from engine.plan.optimizer_table import OPTIMIZERS
from engine.plan.schedule_table import OURS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from engine.config import Config

PARAMS = ("optimizer", "scheduler")
"""Sections whose ``params`` hold the arguments of a constructor, one key each."""


@dataclass(frozen=True)
class Key:
    """One key. ``parts`` is its canonical path; ``description`` the one sentence of its section's field.

    ``absent`` is the path of the section around it that the config lacks, whose defaults are shown; None where it is
    there. ``switch`` is the path of the key that switches the section off, where something does.
    """

    parts: Path
    value: Any
    description: str
    absent: str | None = None
    switch: str | None = None

    @property
    def path(self) -> str:
        return join_path(self.parts)


def all_keys(config: Config) -> Iterator[Key]:
    """Every key, in the order of the sections; those of sections that are not given with their defaults."""
    yield from _keys(config, type(config), (), None, None)


def _keys(value: Any, model: type[BaseModel], path: Path, absent: str | None, switch: str | None) -> Iterator[Key]:
    """``value`` is an instance of ``model``, or None where the section is not given."""
    for name, info in model.model_fields.items():
        here = (*path, name)
        default = info.get_default(call_default_factory=True)
        held = default if value is None else getattr(value, name)
        described = info.description or ""
        inner = section_of(info.annotation)
        if inner is None and name == "params" and path in ((PARAMS[0],), (PARAMS[1],)):
            yield from _arguments(value, here, absent)
        elif inner is None or (not held and not _holds_one(info.annotation)):
            yield Key(here, _plain(held), described, absent, switch)
        elif isinstance(held, Mapping):
            for key, item in held.items():
                yield from _keys(item, inner, (*here, str(key)), absent, switch)
        elif isinstance(held, list):
            for index, item in enumerate(held):
                yield from _keys(item, inner, (*here, index), absent, switch)
        else:
            missing = absent or (join_path(here) if held is None else None)
            yield from _keys(held, inner, here, missing, switch or off_switch(held, inner, here))


def _arguments(section: Any, path: Path, absent: str | None) -> Iterator[Key]:
    """The arguments that are given, and those with a default that the type takes."""
    given = {} if section is None else dict(section.params)
    kind = str(path[0])
    defaults: Mapping[str, Any] = {}
    if section is not None and section.type is not None:
        defaults = OPTIMIZERS[section.type].defaults if section.type in OPTIMIZERS else {}
        defaults = OURS[section.type].defaults if kind == "scheduler" and section.type in OURS else defaults
    for argument, value in ({**defaults, **given} or {}).items():
        yield Key((*path, argument), _plain(value), meaning(kind, argument), absent)
    if not defaults and not given:
        yield Key(path, {}, "The arguments of the constructor.", absent)


SWITCHES: dict[str, tuple[Any, ...]] = {
    "enabled": (False,),
    "device": ("none",),
    "stages": ("auto", 0, 1),
    "size": (0, 1),
    "deepcompile": (False,),
}
"""Keys that switch the section they stand in -> the values that switch it off."""


def off_switch(section: Any, model: type[BaseModel], path: Path) -> str | None:
    """The path of the key that switches a section off, None where it is on or has no switch."""
    if section is None:
        return None
    for name, off in SWITCHES.items():
        if name in model.model_fields and getattr(section, name) in off:
            return join_path((*path, name))
    return None


def _holds_one(annotation: Any) -> bool:
    return not any(get_origin(member) in (dict, list) for member in members(annotation))


def _plain(value: Any) -> Any:
    """A value as JSON has it: tuples are lists, sections objects."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
