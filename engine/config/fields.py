"""What the annotations of the sections say: which types a key takes, in the program's terms and in people's."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config.messages import show


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in members(part))
    return (annotation,)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, itself or as the items of a list or the values of an object."""
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
        for argument in get_args(member):
            if isinstance(argument, type) and issubclass(argument, BaseModel):
                return argument
    return None


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values of the ``Literal`` members."""
    return tuple(value for member in members(annotation) if get_origin(member) is Literal for value in get_args(member))


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text in quotes", type(None): "null"}
_PLURALS = {bool: "true or false", int: "integers", float: "numbers", str: "texts"}


def allowed(info: FieldInfo) -> str:
    """What a key takes, in words: "an integer from 0 to 3", "true or false, or null"."""
    words = [_word(member) for member in members(info.annotation)]
    limits = _limits(info)
    if limits:
        words = [word + limits if word in ("an integer", "a number") else word for word in words]
    if "an integer" in words and "a number" in words:
        words.remove("an integer")
    if len(words) > 1 and any(" or " in word for word in words[:-1]):
        return ", ".join(words[:-1]) + ", or " + words[-1]
    return " or ".join(words)


def _word(member: Any) -> str:
    if member in _NAMES:
        return _NAMES[member]
    origin = get_origin(member)
    if origin is Literal:
        *first, last = (show(value) for value in get_args(member))
        return f"{', '.join(first)} or {last}" if first else last
    if origin is list:
        inner = members(get_args(member)[0])
        return "a list of " + " or ".join(_PLURALS.get(part, "values" if part is Any else "objects") for part in inner)
    if member is Any:
        return "anything"
    return "an object"


def _limits(info: FieldInfo) -> str:
    low = high = ""
    for limit in info.metadata:
        if isinstance(limit, annotated_types.Ge):
            low = f">= {limit.ge}"
        elif isinstance(limit, annotated_types.Gt):
            low = f"> {limit.gt}"
        elif isinstance(limit, annotated_types.Le):
            high = f"<= {limit.le}"
        elif isinstance(limit, annotated_types.Lt):
            high = f"< {limit.lt}"
    if low.startswith(">= ") and high.startswith("<= "):
        return f" from {low[3:]} to {high[3:]}"
    return (" " + " and ".join(part for part in (low, high) if part)) if low or high else ""
