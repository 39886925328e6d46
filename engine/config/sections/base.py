"""What every section of the config is."""

# No postponed annotations in the sections: pydantic would compile each one again from text when it is imported.
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class Fault(NamedTuple):
    """A contradiction inside one section. ``key`` is relative to the section and may be dotted. ``code`` is one of
    `engine.config.messages.CODES`; '' means missing-key where the key has no value, else conflict. ``depends`` are the
    other keys that make it a contradiction: nothing is said while the value of one of them is not known."""

    key: str
    message: str
    allowed: str = ""
    repair: str = ""
    code: str = ""
    depends: tuple[str, ...] = ()


class Section(BaseModel):
    """A JSON object: frozen, exact types, no unknown keys, no NaN.

    Every key has a default, so that one wrong key never hides what else is wrong; what a switched-on feature cannot do
    without is demanded by `faults`.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    ignored_by_deepspeed: ClassVar[bool] = False
    """True where DeepSpeed reads the section with ``dict.get``: a misspelled key is ignored there without a word."""

    shorthand: ClassVar[str] = ""
    """The key that a bare value in place of the section most likely means, for the repair."""

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = ()
    """What `faults` demands and JSON Schema can say; goes into the schema's ``allOf``."""

    def faults(self) -> Iterator[Fault]:
        """Contradictions between keys of this section."""
        yield from ()


PRESENT: dict[str, Any] = {"not": {"type": "null"}}
"""The JSON Schema of a key that a rule asks for: any value but null."""


def when(key: str, value: Any, **then: Any) -> dict[str, Any]:
    """The JSON Schema rule "if ``key`` is ``value``, then ..."."""
    return {"if": {"properties": {key: {"const": value}}, "required": [key]}, "then": then}


def nested(section: type[Section], description: str) -> Any:
    """A key that holds ``section``, all defaults where it is not given. (Built without a validator: import stays
    fast.)"""
    return Field(default_factory=section.model_construct, description=description)
