"""From plain JSON to what the sections accept: comments and unknown keys go, "auto" is taken out, spellings are read.

Walks the tree beside the models. It reports what no model can see (unknown keys with a suggestion, unfilled
placeholders) and
leaves types and ranges to pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from engine.config.dialect import DTYPE_NAMES, truth
from engine.config.fields import allowed, choices, members, section_of
from engine.config.messages import Note, Problem, show
from engine.config.places import Path, Places, join_path
from engine.config.reader import looks_unfilled, placeholder
from engine.config.sections.arguments import OPTIMIZER_PARAMS, SCHEDULER_PARAMS, TORCH_SCHEDULERS, argument_type
from engine.config.sections.base import Section
from engine.config.sections.optimizer import OptimizerSection, SchedulerSection
from engine.config.suggest import ADVICE, MEANT, extended, nearest, repair_for

_PARAMS = {"params"}
_REMOVED: Any = object()
LARGEST = 2.0**63
"""Beyond it a float does not say which integer is meant."""
ANSWERS = {"Muon": ", and DeepSpeed drops it without a word"}
"""What DeepSpeed does with an argument that an optimizer does not have, where it is not a TypeError."""

MAX_SUGGESTIONS = 30
"""Looking for the nearest key takes milliseconds; a file with more unknown keys than this is no config."""


def is_comment(key: str) -> bool:
    return key.startswith(("_", "//")) or key == "$schema"


@dataclass
class Walk:
    """Collects what is found on the way. ``supply`` holds values for "auto", by canonical path."""

    places: Places
    lenient: bool = False
    supply: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    autos: set[str] = field(default_factory=set)
    supplied: set[str] = field(default_factory=set)
    integers: list[tuple[Path, float]] = field(default_factory=list)
    num_unknown: int = 0
    is_template: bool = False
    """Other values of the source are placeholders: texts that look like one are as well."""
    meant: set[str] = field(default_factory=set)
    """Canonical paths that an unknown key may have meant."""

    def note(self, path: Path, message: str) -> None:
        self.notes.append(Note(join_path(self.places.written(path)), message, self.places.of_key(path)[1]))

    def problem(self, path: Path, message: str, code: str, at_key: bool = False, **more: Any) -> None:
        file, line, column = self.places.of_key(path) if at_key else self.places.of_value(path)
        written = join_path(self.places.written(path))
        self.problems.append(Problem(written, message, code, file, line, column, **more))

    # --- objects ---

    def section(self, data: dict[str, Any], model: type[BaseModel], path: Path) -> dict[str, Any]:
        """The object for ``model``, without what does not belong in it."""
        result: dict[str, Any] = {}
        extra_allowed = model.model_config.get("extra") == "allow"
        for key, value in data.items():
            here = (*path, key)
            if key not in model.model_fields:
                if is_comment(key) and self.places.override(here) is None:
                    continue
                if extra_allowed:
                    result[key] = value
                else:
                    self.unknown(here, value, model)
                continue
            value = self.value(value, model, key, here)
            if value is not _REMOVED:
                result[key] = value
        return result

    def unknown(self, path: Path, value: Any, model: type[BaseModel]) -> None:
        self.num_unknown += 1
        repair = "correct its name or delete it"
        if self.num_unknown <= MAX_SUGGESTIONS:
            suggestion = repair_for(self.places.written(path), model.model_fields, value)
            repair = suggestion.repair or repair
            self.meant |= set(suggestion.targets)
        argument = self.places.override(path)
        more = {"found": value, "options": tuple(model.model_fields)}
        if argument is not None:
            repair = repair or "leave it out"
            self.problem(path, "there is no such key", "unknown-key", at_key=True, repair=repair, **more)
        elif self.lenient:
            self.note(path, "unknown key, ignored" + (f"; {repair}" if repair else ""))
        else:
            ignored = issubclass(model, Section) and model.ignored_by_deepspeed
            message = "unknown key (DeepSpeed ignores it)" if ignored else "unknown key"
            repair = repair or f'delete it, or call it "_{path[-1]}" to keep it as a comment'
            self.problem(path, message, "unknown-key", at_key=True, repair=repair, **more)

    def value(self, value: Any, model: type[BaseModel], key: str, path: Path) -> Any:
        """The value of a known key, or ``_REMOVED`` when the default is to stand."""
        info = model.model_fields[key]
        section = section_of(info.annotation)
        if isinstance(value, str) and value.strip() == "auto" and "auto" not in choices(info.annotation):
            value = self.auto(path)
            if value is _REMOVED:
                return _REMOVED
        if value is None and section is not None and type(None) not in members(info.annotation):
            self.note(path, "null: the defaults of this section stand")
            return _REMOVED
        if isinstance(value, dict):
            if key in _PARAMS and model in (OptimizerSection, SchedulerSection):
                return value  # taken up by `typed_params`, once the type is known
            if section is not None:
                return self.inner(value, info.annotation, section, path)
            return value
        if isinstance(value, list) and section is not None:
            items = [(item, (*path, index)) for index, item in enumerate(value)]
            return [self.section(item, section, at) if isinstance(item, dict) else item for item, at in items]
        return self.scalar(value, info.annotation, path, allowed(info))

    def inner(self, value: dict[str, Any], annotation: Any, section: type[BaseModel], path: Path) -> Any:
        if any(get_origin(member) is dict for member in members(annotation)):
            return {
                key: self.section(item, section, (*path, key)) if isinstance(item, dict) else item
                for key, item in value.items()
                if not is_comment(key)
            }
        result = self.section(value, section, path)
        if section is OptimizerSection:
            self.typed_params(result, OPTIMIZER_PARAMS, "optimizer", path)
        elif section is SchedulerSection:
            self.typed_params(result, SCHEDULER_PARAMS, "schedule", path)
        return result

    def auto(self, path: Path) -> Any:
        name = join_path(path)
        if name in self.supply:
            self.supplied.add(name)
            return self.supply[name]
        self.autos.add(name)
        return _REMOVED

    # --- constructor arguments ---

    def typed_params(self, data: dict[str, Any], table: dict[str, tuple[str, ...]], what: str, path: Path) -> None:
        known = self.canonical_type(data, table, what, path)
        params = data.get("params")
        if params is None:
            data.pop("params", None)
            return
        if not isinstance(params, dict):
            return
        result: dict[str, Any] = {}
        for key, value in params.items():
            here = (*path, "params", key)
            if is_comment(key):
                continue
            if known is not None and key not in known:
                self.unknown_param(here, value, known, data.get("type"))
                continue
            if isinstance(value, str) and value.strip() == "auto":
                value = self.auto(here)
                if value is _REMOVED:
                    continue
            kind = argument_type(key) or (list[float] if isinstance(value, list) else None)
            if kind is not None:
                value = self.scalar(value, kind, here, "")
            if value is not _REMOVED:
                result[key] = value
        data["params"] = result

    def canonical_type(
        self, data: dict[str, Any], table: dict[str, tuple[str, ...]], what: str, path: Path
    ) -> tuple[str, ...] | None:
        """Bring a type's name to its canonical capitals. The names of its arguments, None where they are not known."""
        name = data.get("type")
        if not isinstance(name, str) or not name:
            return None
        others = TORCH_SCHEDULERS if what == "schedule" else ()
        folded = {entry.lower(): entry for entry in (*table, *others)}
        canonical = folded.get(name.lower())
        if canonical is not None:
            if canonical != name:
                self.note((*path, "type"), f"{name} is read as {canonical}")
            data["type"] = canonical
            return table.get(canonical)
        if "." in name or ":" in name:
            return None
        near = nearest(name, folded.values())
        repair = f"did you mean {near}?" if near else "name a class of your own by its dotted path"
        names = "" if near else ", ".join((*table, *others))
        message = f"there is no {what} {show(name)}"
        every = (*table, *others)
        self.problem((*path, "type"), message, "unknown-type", found=name, allowed=names, repair=repair, options=every)
        return None

    def unknown_param(self, path: Path, value: Any, names: tuple[str, ...], owner: Any) -> None:
        key = str(path[-1])
        meant = MEANT.get(key.lower())
        near = nearest(key, names) or (extended(key, names) if meant is None else None)
        message = f"{owner} has no such argument{ANSWERS.get(str(owner), ', and DeepSpeed ends in a TypeError')}"
        repair = f"did you mean {near}?" if near else f"did you mean {meant}?" if meant and key != "lr" else ""
        repair = ADVICE.get(f"{owner}.{key}".lower(), repair)
        if key == "max_grad_norm":
            message, repair = "DeepSpeed refuses it", "use gradient_clipping, at the top level, and delete it here"
            if ("gradient_clipping",) in self.places.keys:
                repair = "delete it here: gradient_clipping, at the top level, is what counts"
            self.meant.add("gradient_clipping")
        elif self.lenient:
            self.note(path, f"{message}; ignored")
            return
        known = "" if repair else ", ".join(names)
        repair = repair or "delete it"
        self.problem(
            path, message, "unknown-key", at_key=True, found=value, allowed=known, repair=repair, options=names
        )

    # --- scalars and lists of scalars ---

    def scalar(self, value: Any, annotation: Any, path: Path, words: str) -> Any:
        """Read a value as what it means for the types that its key takes; what cannot be read is left for pydantic."""
        kinds = members(annotation)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, list):
            inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), Any)
            items = [self.scalar(item, inner, (*path, index), words) for index, item in enumerate(value)]
            return _REMOVED if any(item is _REMOVED for item in items) else items
        if isinstance(value, float):
            if float not in kinds and int in kinds and value.is_integer() and abs(value) < LARGEST:
                self.integers.append((path, value))
                return int(value)
            return value
        if isinstance(value, int):
            if bool in kinds and int not in kinds and float not in kinds and value in (0, 1):
                self.note(path, f"{value} is read as {show(bool(value))}")
                return bool(value)
            return value
        return self.text(value, annotation, path, words) if isinstance(value, str) else value

    def text(self, value: str, annotation: Any, path: Path, words: str) -> Any:
        kinds = members(annotation)
        options = choices(annotation)
        name = placeholder(value)
        if name is None and looks_unfilled(value) and (self.is_template or (options and value not in options)):
            name = value
        if name is not None:
            self.problem(
                path,
                f"the placeholder {name} has not been filled in",
                "placeholder",
                found=value,
                allowed=words,
                repair="put a value in its place",
            )
            return _REMOVED
        if options:
            return self.option(value, options, path)
        if str in kinds:
            return value
        if any(get_origin(kind) is list and get_args(kind)[0] is str for kind in kinds):
            self.note(path, f"{show(value)} is read as a list of one")
            return [value]
        read: Any = None
        if bool in kinds:
            read = truth(value)
        elif int in kinds or float in kinds:
            read = _number(value, integer=float not in kinds)
        if read is None:
            return value
        self.note(path, f"the text {show(value)} is read as {show(read)}: leave out the quotes")
        return read

    def option(self, value: str, options: tuple[Any, ...], path: Path) -> Any:
        if value in options:
            return value
        folded = {option.lower(): option for option in options if isinstance(option, str)}
        read = folded.get(value.strip().lower())
        if read is None and folded.keys() & {"fp32", "fp16", "bf16"}:
            read = folded.get(DTYPE_NAMES.get(value.strip().lower(), ""))
        if read is None:
            return value
        self.note(path, f"{show(value)} is read as {show(read)}")
        return read


def _number(text: str, integer: bool) -> int | float | None:
    try:
        number = float(text.replace("_", "x"))
    except ValueError:
        return None
    if number != number or abs(number) > 1e300:
        return None
    if integer:
        return int(number) if number.is_integer() and abs(number) < LARGEST else None
    return number
