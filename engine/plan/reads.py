"""Which values a rule reads: a rule that read one that is wrong in the file has nothing true to say about it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from engine.plan.findings import Findings

if TYPE_CHECKING:
    from engine.config import Config

P = ParamSpec("P")
T = TypeVar("T")


class Rules:
    """Runs the rules one by one, and takes back what one found that rests on an ``unclear`` value.

    ``unclear``: canonical paths whose value in the config is a default in place of one that cannot be used. What a rule
    returns after reading one is unclear as well.
    """

    def __init__(self, config: Config, findings: Findings, unclear: Collection[str]) -> None:
        self.config = cast("Config", _Watched(config, findings.reads, "")) if unclear else config
        self._findings = findings
        self._unclear = unclear
        self._results: list[Any] = []

    def run(self, rule: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        findings = self._findings
        findings.reads.clear()
        kept = (len(findings.problems), len(findings.needs_values))
        result = rule(*arguments, **keywords)
        if self._unclear and self._rests_on_unclear(arguments):
            del findings.problems[kept[0] :]
            del findings.needs_values[kept[1] :]
            if result is not None:
                self._results.append(result)
        return result

    def _rests_on_unclear(self, arguments: tuple[Any, ...]) -> bool:
        if any(argument is result for argument in arguments for result in self._results):
            return True
        return any(_overlap(read, path) for read in self._findings.reads for path in self._unclear)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith((other + ".", other + "[")) or other.startswith((one + ".", one + "["))


class _Watched:
    """A section that notes which of its values are read."""

    def __init__(self, section: Any, reads: set[str], path: str) -> None:
        self._section, self._reads, self._path = section, reads, path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        if name not in type(self._section).model_fields:
            if self._path:
                self._reads.add(self._path)
            return value
        path = f"{self._path}.{name}" if self._path else name
        if hasattr(type(value), "model_fields"):
            return _Watched(value, self._reads, path)
        self._reads.add(path)
        return value
