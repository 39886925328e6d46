"""The config's keys and the rest of the house: generated files are fresh, and no key is silently without effect."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from engine.config import Config, docs, schema
from engine.config.built import NOT_BUILT
from engine.config.remarks import SERVICES, WITHOUT_EFFECT
from engine.config.sections.base import Section
from engine.plan.ineffective import INEFFECTIVE

ENGINE = Path(__file__).resolve().parents[2] / "engine"
SWITCHES = ("enabled", "device", "stages", "size", "deepcompile")
"""Keys that switch the section they stand in: where such a key is not built, its neighbours are not either."""


def sections_in(annotation: object) -> Iterator[type[Section]]:
    """The section classes that an annotation such as ``dict[str, A] | None`` speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from sections_in(argument)


def all_keys(section: type[Section], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, field in section.model_fields.items():
        yield (*above, key)
        for inner in sections_in(field.annotation):
            yield from all_keys(inner, (*above, key))


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Every word of the engine's source but for the declarations of the keys themselves."""
    files = [path for path in ENGINE.rglob("*.py") if path.parent.name != "sections" and path.name != "config.py"]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text("utf-8")))


def is_spoken_for(key: tuple[str, ...]) -> bool:
    """Whether a section around the key, or the key itself, is refused as not built or noted as meaning nothing."""
    not_built = {path.rpartition(".")[0] if path.rpartition(".")[2] in SWITCHES else path for path in NOT_BUILT}
    noted = {entry.path for entry in INEFFECTIVE} | WITHOUT_EFFECT.keys() | SERVICES.keys()
    return any(".".join(key[:depth]) in not_built | noted for depth in range(1, len(key) + 1))


def test_every_key_is_read_refused_or_noted() -> None:
    silent = [key for key in all_keys(Config) if key[-1] not in words_of_the_code() and not is_spoken_for(key)]
    assert not [".".join(key) for key in silent], "these keys are accepted and nothing ever comes of them"


def test_the_classes_of_the_sections_are_named_after_their_keys() -> None:
    misnamed = []
    for key, field in Config.model_fields.items():
        camel_case = "".join(word.capitalize() for word in key.split("_"))
        for section in sections_in(field.annotation):
            if not camel_case.startswith(section.__name__.removesuffix("Section")):
                misnamed.append(f"{key}: {section.__name__}")
    assert not misnamed


def test_the_schema_is_fresh() -> None:
    assert schema.FILE.read_text("utf-8") == schema.render(), "run `make docs`"


def test_the_config_reference_is_fresh() -> None:
    assert docs.FILE.read_text("utf-8") == docs.render(), "run `make docs`"
