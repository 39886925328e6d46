"""`load_config`: from a path, a dict or a `Config` to a typed `Config`, or one `ConfigError` with everything that is
wrong."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.config.checks import faults, validate
from engine.config.config import Config, Provenance
from engine.config.dialect import Translation, translate, truth
from engine.config.examination import Examination
from engine.config.messages import ConfigError, Note, Problem, show
from engine.config.places import Path, Places, join_path, parse_path
from engine.config.plain import plain
from engine.config.reader import MAX_BYTES, Document, read_text
from engine.config.remarks import remarks
from engine.config.translation import put
from engine.config.walk import Walk

_BEGINNINGS = frozenset('{["-0123456789tfn')

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
"""Without one of them there is no run."""

READ_AS_INTEGERS = "numbers written with a point or an exponent are read as integers"

Source = str | os.PathLike[str] | Mapping[str, Any] | Config
Overrides = Mapping[str, Any] | Sequence[str]


def load_config(
    source: Source, *, overrides: Overrides = (), auto: Mapping[str, Any] | None = None, lenient: bool = False
) -> Config:
    """Read, translate, type and check a configuration.

    Args:
        source: a JSON file, a dict (which is not changed), or a `Config`.
        overrides: ``["zero_optimization.stage=2"]`` (the value is JSON where it parses, else text) or a mapping from
        path to
            value. Sections are created.
        auto: values for keys that say "auto", by path or as nested dicts; others are not touched, but for the batch
            sizes where the source gives neither of the two.
        lenient: unknown keys become notes, as with ``"strict": false``.

    Raises:
        ConfigError: with all problems at once.
    """
    found = examine(source, overrides=overrides, auto=auto, lenient=lenient)
    if found.problems or found.config is None:
        raise ConfigError(found.problems)
    return found.config


def examine(
    source: Source, *, overrides: Overrides = (), auto: Mapping[str, Any] | None = None, lenient: bool = False
) -> Examination:
    """`load_config` without the raise, for commands that go on to look for more."""
    document = _open(source)
    translation = Translation(document.value, document.places)
    translate(translation)
    problems = [*document.problems, *_override(translation, overrides), *translation.problems]
    if not document.complete:
        return Examination(None, _sorted(problems), tuple(translation.notes))
    tree = translation.tree
    strict = tree.get("strict", True)
    supply = plain(auto if isinstance(auto, Mapping) else {})
    problems += supply.problems
    if auto is not None and not isinstance(auto, Mapping):
        message = f"auto is a mapping from paths to values, not {type(auto).__name__}"
        shape = 'a mapping, such as {"optimizer.params.lr": 1e-4}'
        repair = "pass auto={...}"
        problems.append(Problem("", message, "source", found=show(auto), repair=repair, options=(shape,)))
    supplied = _flatten(supply.value, document.places)
    if not tree.keys() & BATCH_SIZES and not document.broken & {(key,) for key in BATCH_SIZES}:
        tree |= {key: "auto" for key in BATCH_SIZES if key in supplied}
    walk = Walk(document.places, lenient or truth(strict) is False, supplied)
    walk.is_template = any(problem.code == "placeholder" for problem in document.problems)
    typed = walk.section(copy.deepcopy(tree), Config, ())
    problems += walk.problems
    config, wrong = validate(typed, document.places)
    problems += wrong
    wrong_paths = {_key(problem.path) for problem in problems if problem.path}
    wrong_paths |= {join_path(path) for path in document.broken} | walk.meant | translation.meant
    contradictions = faults(config, document.places, wrong_paths | walk.autos)
    problems += contradictions
    wrong_paths |= {_key(problem.path) for problem in contradictions}
    raw = _merge_back(tree, config, walk)
    notes = (*translation.notes, *walk.notes, *_integer_note(walk))
    provenance = Provenance(
        source=document.places.file,
        raw=raw,
        places=document.places,
        autos=frozenset(walk.autos),
        supplied=frozenset(walk.supplied),
    )
    config._provenance = provenance
    provenance.notes = (*notes, *(_remark(config, path, message) for path, message in remarks(config)))
    places = document.places
    unclear = (join_path(places.canonical(parse_path(path))) for path in wrong_paths)
    return Examination(config, _sorted(problems), provenance.notes, frozenset(unclear) if problems else frozenset())


def _remark(config: Config, path: str, message: str) -> Note:
    return Note(join_path(config._provenance.places.written(parse_path(path))), message, config.locate(path)[1])


def _key(path: str) -> str:
    return join_path(parse_path(path))


def _sorted(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    return ConfigError({problem.render(): problem for problem in problems}.values()).problems


# --- sources ---


def _open(source: Source) -> Document:
    if isinstance(source, Config):
        provenance = source._provenance
        places = copy.deepcopy(provenance.places)
        return Document(copy.deepcopy(provenance.raw) or source.model_dump(mode="json"), places)
    if isinstance(source, Mapping):
        return plain(source)
    if isinstance(source, str | os.PathLike):
        return _open_file(os.fspath(source))
    message = f"a config is a path, a dict or a Config, not {type(source).__name__}"
    return _refused(None, message, "source", "pass one of the three", repr(source)[:60])


def _refused(
    file: str | None, message: str, code: str = "file", repair: str = "", found: str | None = None
) -> Document:
    options = ("the path of a readable JSON file, a dict or a Config",)
    repair = repair or "check the path and the permissions"
    problem = Problem("", message, code, file, found=found or file, repair=repair, options=options)
    return Document(problems=[problem], complete=False, places=Places(file))


def _open_file(path: str | bytes) -> Document:
    name = os.fsdecode(path)
    if name.lstrip().startswith("{"):
        return _refused(
            None, "JSON text was given where the path of a file should be", repair="give a file, or json.loads(text)"
        )
    try:
        if os.path.isdir(name):
            return _refused(name, "is a folder", repair="give the JSON file itself")
        size = os.path.getsize(name)
        if size > MAX_BYTES:
            limit = MAX_BYTES // 2**20
            return _refused(
                name, f"has {size / 2**20:.0f} MiB; a config has at most {limit}", repair="is this the right file?"
            )
        with open(name, "rb") as stream:
            content = stream.read()
    except FileNotFoundError:
        return _refused(name, "there is no such file", repair=_beside(name))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _refused(name, f"cannot be read: {reason}")
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        message = f"byte 0x{content[error.start]:02x} is not UTF-8 text"
        return Document(
            problems=[
                Problem(
                    "",
                    message,
                    "encoding",
                    name,
                    line,
                    column,
                    f"0x{content[error.start]:02x}",
                    repair="save the file as UTF-8",
                    options=("UTF-8, UTF-16 with a BOM",),
                )
            ],
            complete=False,
            places=Places(name),
        )
    return read_text(text, name)


def _beside(name: str) -> str:
    """The config that may have been meant: a file of nearly the same name in the same folder."""
    from engine.config.suggest import nearest

    folder = os.path.dirname(name) or "."
    try:
        others = sorted(entry for entry in os.listdir(folder) if entry.endswith(".json"))[:200]
    except OSError:
        return f"the folder {folder} does not exist either"
    near = nearest(os.path.basename(name), others)
    return f"did you mean {os.path.join(os.path.dirname(name), near)}?" if near else "check the name of the file"


# --- overrides and values for "auto" ---


def _override(translation: Translation, overrides: Overrides) -> list[Problem]:
    problems: list[Problem] = []
    for path_text, value, argument in _arguments(overrides, problems):
        path = translation.places.canonical(parse_path(path_text))
        if not path or any(isinstance(part, int) for part in path):
            message = "the path must name a key, such as zero_optimization.stage"
            repair, options = "name the key, not the whole file or an item of a list", ("PATH=VALUE",)
            problems.append(
                Problem(
                    path_text, message, "override", f"--set {argument}", found=argument, repair=repair, options=options
                )
            )
            continue
        put(translation.tree, path, copy.deepcopy(value))
        translation.places.overrides[path] = argument
    if translation.places.overrides:
        translate(translation)
    return problems


def _arguments(overrides: Overrides, problems: list[Problem]) -> Iterable[tuple[str, Any, str]]:
    if isinstance(overrides, Mapping):
        given = plain(dict(overrides))
        problems += given.problems
        for path, value in given.value.items():
            yield path, value, f"{path}={show(value)}"
        return
    for argument in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, text = str(argument).partition("=")
        if not equals or not path.strip():
            problems.append(
                Problem(
                    "",
                    "there is no = in it",
                    "override",
                    f"--set {argument}",
                    found=str(argument),
                    repair="write --set path=value",
                    options=("PATH=VALUE",),
                )
            )
            continue
        yield path.strip(), _literal(text.strip()), str(argument)


def _literal(text: str) -> Any:
    """JSON where the text is JSON, else the text itself."""
    if text[:1] not in _BEGINNINGS:
        return text
    document = read_text('{"value": ' + text + "}")
    whole = document.complete and not document.problems and document.value.keys() == {"value"}
    return document.value["value"] if whole else text


def _flatten(auto: Mapping[str, Any], places: Places, above: Path = ()) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in auto.items():
        path = (*above, *parse_path(str(key)))
        if isinstance(value, Mapping):
            flat |= _flatten(value, places, path)
        flat[join_path(places.canonical(path))] = value
    return flat


# --- afterwards ---


def _merge_back(tree: dict[str, Any], config: Config, walk: Walk) -> dict[str, Any]:
    """What the user wrote, with values as they were read and "auto" still standing where nobody supplied a value."""
    effective = config.model_dump(mode="json", exclude_unset=True)

    def merge(written: Any, read: Any, path: Path) -> Any:
        if not isinstance(written, dict):
            return written if join_path(path) in walk.autos or read is None else read
        if not isinstance(read, dict):
            return read
        kept = {key: merge(value, read[key], (*path, key)) for key, value in written.items() if key in read}
        waiting = {key: "auto" for key in written if key not in read and join_path((*path, key)) in walk.autos}
        return kept | waiting

    merged: dict[str, Any] = merge(tree, effective, ())
    return merged


def _integer_note(walk: Walk) -> list[Note]:
    """One note for all numbers that were written as 5e8 where an integer is meant: a common and harmless habit."""
    if not walk.integers:
        return []
    parts = ", ".join(f"{join_path(walk.places.written(path))} = {int(value)}" for path, value in walk.integers)
    first = walk.integers[0][0]
    message = f"{READ_AS_INTEGERS}: {parts}"
    return [Note(join_path(walk.places.written(first)), message, walk.places.of_value(first)[1])]
