"""The answer of ``validate``: is this config right, what does it still need, what does this engine lack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.config.messages import ConfigError, Note, Problem
from engine.plan.facts import ModelFacts
from engine.plan.plan import World
from engine.plan.resolve import NOT_BUILT, examine

if TYPE_CHECKING:
    from engine.config import Config

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


def verdict(config: Config, world: World | None = None, facts: ModelFacts | None = None) -> Verdict:
    """Judges ``config`` for ``world`` (one process by default) without raising."""
    _, findings = examine(config, world or World(), facts)
    problems = ConfigError(problem for problem in findings.problems if problem.code != NOT_BUILT).problems
    not_built = tuple(problem.path for problem in findings.problems if problem.code == NOT_BUILT)
    needs_values = tuple(findings.needs_values)
    kind: VerdictKind = (
        "invalid" if problems else "not-built" if not_built else "needs-values" if needs_values else "valid"
    )
    return Verdict(kind, problems, needs_values, not_built, (*config.notes, *findings.notes))
