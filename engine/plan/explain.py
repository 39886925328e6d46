"""What every key of a config does in one run: `explain`, which reads the plan and is read by people and programs."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine.config.load import READ_AS_INTEGERS, Overrides, Source
from engine.config.load import examine as examine_source
from engine.config.messages import ConfigError, Note, Problem
from engine.config.places import join_path, parse_path
from engine.plan.findings import Findings
from engine.plan.fitting import fitting_world
from engine.plan.inert import InertKeys
from engine.plan.keys import SWITCHES, Key, all_keys
from engine.plan.plan import Origin, Plan, World
from engine.plan.resolve import sketch
from engine.plan.sentences import SAY_WHY, sentence
from engine.plan.subjects import DEFAULTS_THAT_MATTER, OF_16_BITS, subject_of
from engine.plan.verdict import Verdict, verdict
from engine.plan.world import imagined_world

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from engine.config import Config
    from engine.plan.facts import ModelFacts

Status = Literal["acts", "as-always", "inert", "conflict", "needs-value", "not-built"]


@dataclass(frozen=True)
class Explanation:
    """One key. ``path`` is as the user wrote it; ``key`` is its canonical path.

    ``status``: it acts; its value asks for what happens anyway; it has no effect; it contradicts something; it is still
    "auto"; it switches on what this engine does not have. ``reason`` says why, and is '' where it simply acts.
    ``source`` is where the value comes from: "line 12", "--set a=1", "default", "derived".
    """

    path: str
    key: str
    value: Any
    origin: Origin
    source: str
    subject: str
    status: Status
    meaning: str
    reason: str = ""
    remark: str = ""
    because: str = ""
    """Why the value is what it is, where nobody wrote it: "neither bf16 nor fp16 is on"."""
    surprises: bool = False
    """Whether people should see it although nobody wrote it, because of what it defaults to here."""

    @property
    def is_written(self) -> bool:
        return self.origin in ("user", "auto")

    @property
    def matters(self) -> bool:
        """Whether a reader who did not write the key should still see it."""
        if self.status in ("conflict", "needs-value", "not-built") or self.is_written:
            return True
        return self.status == "acts" and (self.origin == "derived" or self.surprises)

    def to_json(self) -> dict[str, Any]:
        names = (
            "path",
            "key",
            "value",
            "origin",
            "source",
            "subject",
            "status",
            "meaning",
            "reason",
            "remark",
            "because",
        )
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Explained:
    """A whole config. ``plan`` is None where there is no batch to plan for; ``verdict`` judges the config."""

    file: str | None
    config: Config
    world: World
    plan: Plan | None
    verdict: Verdict
    keys: tuple[Explanation, ...]

    def render(self, columns: int = 100, everything: bool = False) -> str:
        """The explanation for people, in lines of at most so many columns; ``everything``: every key there is."""
        from engine.plan.explain_text import render

        return render(self, columns, everything)

    def to_json(self) -> dict[str, Any]:
        """What ``ptrain explain --json`` prints."""
        from engine.plan.explain_text import summary

        return {
            "file": self.file,
            "world": self.world.size,
            "summary": summary(self),
            "keys": [key.to_json() for key in self.keys],
            **self.verdict.to_json(),
        }


def explain(
    source: Source,
    world: World | int | None = None,
    *,
    overrides: Overrides = (),
    auto: Mapping[str, Any] | None = None,
    lenient: bool = False,
    facts: ModelFacts | None = None,
) -> Explained:
    """What each key of a config does on so many ranks: `ptrain explain` as a function. Pure, and without torch.

    ``world``: the ranks, or how many; None: the fewest that its sizes fit. A config with problems is explained as far
    as it can be read; they are in ``verdict`` and at the keys.

    Raises: ConfigError where nothing could be read at all.
    """
    found = examine_source(source, overrides=overrides, auto=auto, lenient=lenient)
    if found.config is None:
        raise ConfigError(found.problems)
    config = found.config
    if world is None:
        world = fitting_world(config)
    elif isinstance(world, int):
        world = imagined_world(config, world, "--world")
    plan, findings = sketch(config, world, facts, found.unclear)
    judged = verdict(found, world, facts)
    keys = tuple(_explained(config, plan, findings, judged, found.notes))
    return Explained(config.source, config, world, plan, judged, keys)


def _explained(
    config: Config, plan: Plan | None, findings: Findings, judged: Verdict, notes: tuple[Note, ...]
) -> Iterator[Explanation]:
    needed = {_canonical(config, path) for path in judged.needs_values}
    not_built = {_canonical(config, path) for path in judged.not_built}
    resolved = {_canonical(config, value.path): value for value in findings.values}
    inert = InertKeys(config, plan)
    problems: dict[str, Problem] = {}
    for problem in judged.problems:
        problems.setdefault(_canonical(config, problem.path), problem)
    read, planned = _by_key(config, notes), _by_key(config, findings.notes)
    in_fp32 = plan is not None and plan.precision.compute == "fp32"
    for key in _with_arguments_of_the_plan(config, findings):
        value, reason = key.value, ""
        origin: Origin = config.origin(key.path)
        if key.path in resolved:
            value, origin, reason = resolved[key.path].value, resolved[key.path].origin, resolved[key.path].reason
            value = list(value) if isinstance(value, tuple) else value
        status, why = _status(key, inert, problems, needed, not_built)
        if status == "conflict":
            found = problems[key.path].found
            value = value if found is None else found
        elif status == "needs-value" and key.path in config.autos:
            value = "auto"
        meaning = sentence(key.path, plan, value) if plan is not None and status == "acts" else None
        if meaning is None and value in SWITCHES.get(str(key.parts[-1]), ()) and len(key.parts) > 1:
            meaning = f"Off. ({key.description})"
        yield Explanation(
            path=join_path(config._provenance.places.written(key.parts)),
            key=key.path,
            value=value,
            origin=origin,
            source=_source(config, key, "user" if key.path in config.autos and status == "needs-value" else origin),
            subject=subject_of(key.path),
            status=status,
            meaning=meaning or key.description,
            reason=why,
            remark=_remark(read[key.path] + ([] if status == "inert" else planned[key.path]), why),
            surprises=key.path in DEFAULTS_THAT_MATTER and not (key.path in OF_16_BITS and in_fp32),
            because="" if key.path in SAY_WHY else reason,
        )


def _by_key(config: Config, notes: Iterable[Note]) -> defaultdict[str, list[str]]:
    """The notes by canonical path; the one that lists all numbers with a point is about no single key."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for note in notes:
        if not note.message.startswith(READ_AS_INTEGERS):
            found[_canonical(config, note.path)].append(note.message)
    return found


def _with_arguments_of_the_plan(config: Config, findings: Findings) -> Iterator[Key]:
    """The keys of the config, and the constructors' arguments that only the plan knows (a length that it derived)."""
    from engine.config.sections.argument_meanings import meaning

    last: Key | None = None
    seen: set[str] = set()

    def missing(kind: str) -> Iterator[Key]:
        for value in findings.values:
            if value.path.startswith(f"{kind}.params.") and value.path not in seen:
                seen.add(value.path)
                parts = parse_path(value.path)
                yield Key(parts, value.value, meaning(kind, str(parts[-1])))

    for key in all_keys(config):
        if last is not None and last.parts[0] != key.parts[0] and last.parts[0] in ("optimizer", "scheduler"):
            yield from missing(str(last.parts[0]))
        if key.parts[1:] == ("params",) and key.parts[0] in ("optimizer", "scheduler"):
            continue
        seen.add(key.path)
        yield key
        last = key


def _status(
    key: Key, inert: InertKeys, problems: dict[str, Problem], needed: set[str], not_built: set[str]
) -> tuple[Status, str]:
    problem = problems.get(key.path)
    if problem is not None:
        return "conflict", "; ".join(part for part in (problem.message, problem.repair) if part)
    if key.path in needed:
        return "needs-value", "only you know the value: write it, or pass it with --set"
    for path in not_built:
        if key.path == path or (key.path.startswith(path + ".") and key.absent is None):
            return "not-built", "this engine does not have it; training refuses the config until it is switched off"
    found = inert(key)
    if found is None:
        return "acts", ""
    return ("as-always" if found.honoured else "inert"), found.reason


def _canonical(config: Config, path: str) -> str:
    return join_path(config._provenance.places.canonical(parse_path(path)))


def _source(config: Config, key: Key, origin: str) -> str:
    if origin not in ("user", "auto"):
        return origin
    file, line, _ = config.locate(key.path)
    if file is not None and file.startswith("--set "):
        return "--set"
    place = f"line {line}" if line is not None else "given"
    return f'{place}, "auto"' if origin == "auto" else place


def _remark(messages: list[str], reason: str) -> str:
    """What the notes at a key add to why it has no effect."""
    return "; ".join(message for message in messages if not reason or reason not in message)


def short_name(file: str | None) -> str:
    """The file as it is spoken of; "the config" where there is none."""
    return "the config" if file is None else os.path.normpath(file)
