"""The answer of ``validate``: is this config right, what does it still need, what does this engine lack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine.config.examination import Examination
from engine.config.messages import ConfigError, Note, Problem
from engine.plan.facts import ModelFacts
from engine.plan.fitting import fitting_world
from engine.plan.plan import World
from engine.plan.resolve import NOT_BUILT, examine
from engine.plan.world import imagined_world

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import Config
    from engine.config.load import Overrides, Source

VerdictKind = Literal["valid", "needs-values", "not-built", "invalid"]


@dataclass(frozen=True)
class Verdict:
    """``problems`` are mistakes; ``needs_values`` are paths that are still "auto"; ``not_built`` are paths of known
    features that are switched on and that this engine lacks. ``kind`` is the gravest of the three."""

    kind: VerdictKind
    problems: tuple[Problem, ...] = ()
    needs_values: tuple[str, ...] = ()
    not_built: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def exit_code(self) -> int:
        """Of ``validate``: 2 where the config is wrong, else 0."""
        return 2 if self.kind == "invalid" else 0

    @property
    def trainable(self) -> bool:
        return self.kind == "valid"

    def to_json(self) -> dict[str, Any]:
        """What ``ptrain validate --json`` prints."""
        return {
            "verdict": self.kind,
            "needs_values": list(self.needs_values),
            "not_built": list(self.not_built),
            "problems": [problem.to_json() for problem in self.problems],
            "notes": [note.to_json() for note in self.notes],
        }

    def render(self) -> str:
        """One line for the verdict, one for each problem and note."""
        lines = [
            {
                "valid": "valid",
                "needs-values": f"valid, needs values: {', '.join(self.needs_values)}",
                "not-built": f"valid, not built here: {', '.join(self.not_built)}",
                "invalid": f"invalid: {len(self.problems)} problem{'' if len(self.problems) == 1 else 's'}",
            }[self.kind]
        ]
        if self.not_built and self.kind != "not-built":
            lines.append(f"not built here: {', '.join(self.not_built)}")
        if self.needs_values and self.kind != "needs-values":
            lines.append(f"needs values: {', '.join(self.needs_values)}")
        lines += [f"  {problem.render()}" for problem in self.problems]
        lines += [f"  note: {note.render()}" for note in self.notes]
        return "\n".join(lines)


def verdict(source: Config | Examination, world: World | None = None, facts: ModelFacts | None = None) -> Verdict:
    """Judges a config for ``world`` without raising; None: the fewest ranks that its sizes fit.

    An `Examination` with problems is judged as far as its values are clear, so that the problems of the config and
    those of its plan are told together.
    """
    config, unclear = (source.config, source.unclear) if isinstance(source, Examination) else (source, frozenset())
    known = source.problems if isinstance(source, Examination) else ()
    if config is None:
        assert isinstance(source, Examination)
        return Verdict("invalid", known, notes=source.notes)
    checked = world or fitting_world(config)
    _, findings = examine(config, checked, facts, unclear)
    found = [problem for problem in findings.problems if problem.code != NOT_BUILT]
    problems = ConfigError([*known, *found]).problems
    needs_values = tuple(config.spelled(path) for path in findings.needs_values)
    kind: VerdictKind = (
        "invalid" if problems else "not-built" if config.not_built else "needs-values" if needs_values else "valid"
    )
    notes = list(config.notes)
    if world is None and checked.size > 1:
        notes.append(Note("", f"checked for {checked.size} ranks, {checked.how}"))
    if not known:
        notes += findings.notes
    return Verdict(kind, problems, needs_values, config.not_built, tuple(notes))


def validate(
    source: Source,
    world: World | int | None = None,
    *,
    overrides: Overrides = (),
    auto: Mapping[str, Any] | None = None,
    lenient: bool = False,
    facts: ModelFacts | None = None,
) -> Verdict:
    """Reads and judges a config, never raising for what is wrong with it: `ptrain validate` as a function.

    Args:
        source: a JSON file, a dict or a `Config`, as for `engine.config.load_config`, as are ``overrides``, ``auto``
            and ``lenient``.
        world: the ranks to judge it for, or how many; None: the fewest that its sizes fit.
    """
    from engine.config.load import examine as read

    found = read(source, overrides=overrides, auto=auto, lenient=lenient)
    if isinstance(world, int):
        world = None if found.config is None else imagined_world(found.config, world, "--world")
    return verdict(found, world, facts)


def usable(found: Examination, size: int | None = None) -> Config:
    """The config that was read, for a plan to be made of it.

    Raises: ConfigError with all problems of the config, and of its plan for ``size`` ranks (None: as many as its sizes
    fit) as far as that can be told.
    """
    if found.config is None:
        raise ConfigError(found.problems)
    if found.problems:
        world = None if size is None else imagined_world(found.config, size, "")
        raise ConfigError(verdict(found, world).problems)
    return found.config
