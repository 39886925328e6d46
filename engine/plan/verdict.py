"""The answer of ``validate``: is this config right, what does it still need, what does this engine lack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine.config.aliases import ALIASES
from engine.config.load import Overrides, Source
from engine.config.load import examine as examine_source
from engine.config.messages import ConfigError, Note, Problem
from engine.config.places import parse_path
from engine.plan.facts import ModelFacts
from engine.plan.plan import World
from engine.plan.resolve import NOT_BUILT, examine
from engine.plan.world import imagined_world

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def validate(
    source: Source,
    world: World | int = 1,
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
        world: the ranks to judge it for, or how many.
    """
    found = examine_source(source, overrides=overrides, auto=auto, lenient=lenient)
    if found.config is None:
        return Verdict("invalid", found.problems, notes=found.notes)
    if isinstance(world, int):
        world = imagined_world(found.config, world, "--world")
    judged = verdict(found.config, world, facts)
    if not found.problems:
        return judged
    further = [problem for problem in judged.problems if not _may_follow(problem, found.problems)]
    problems = ConfigError([*found.problems, *further]).problems
    return Verdict("invalid", problems, judged.needs_values, judged.not_built, found.notes)


SUBJECTS = (
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    | {"pipeline", "tensor_parallel", "sequence_parallel_size", "parallel"},
    {"fp16", "bf16", "torch_autocast", "data_types", "communication_data_type", "amp"},
    {"optimizer", "scheduler", "training"},
)
"""Top-level keys that the rules look at together."""


def _may_follow(problem: Problem, causes: tuple[Problem, ...]) -> bool:
    """Whether a problem that a rule sees may only be there because a value could not be read and its default stands."""
    top = _top_level(problem)
    subject = next((names for names in SUBJECTS if top in names), {top})
    wrong = {_top_level(cause) for cause in causes}
    misspelled = any(cause.code == "unknown-key" and len(parse_path(cause.path)) == 1 for cause in causes)
    return bool(subject & wrong) or "" in wrong or (misspelled and problem.code == "missing-key")


def _top_level(problem: Problem) -> str:
    path = parse_path(problem.path)
    return str(ALIASES.get(path[:1], path)[0]) if path else ""
