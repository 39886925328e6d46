"""What two configs do differently in one world: `diff`. Values are compared as they take effect, not as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from engine.config.load import Overrides, Source
from engine.config.messages import ConfigError, Problem, show
from engine.plan.estimates import estimate_memory, format_bytes
from engine.plan.explain import Explained, Explanation, explain, short_name
from engine.plan.facts import ModelFacts
from engine.plan.findings import plural
from engine.plan.learning_rate import peak
from engine.plan.plan import Plan, World
from engine.plan.sentences import bytes_per_parameter, tokens_per_step
from engine.plan.traffic import estimate_traffic

ABSENT = "not given"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MILLION = 10**6


@dataclass(frozen=True)
class Change:
    """One key whose effective value differs. ``first`` and ``second`` are None where a config has no such key."""

    key: str
    first: Explanation | None
    second: Explanation | None

    @property
    def values(self) -> tuple[Any, Any]:
        """What both say; `ABSENT` for a key that one of them has no place for."""
        return tuple(ABSENT if side is None else side.value for side in (self.first, self.second))  # type: ignore[return-value]

    @property
    def is_written(self) -> bool:
        return any(side is not None and side.is_written for side in (self.first, self.second))

    @property
    def has_effect(self) -> bool:
        return any(side is not None and side.status not in ("inert", "as-always") for side in (self.first, self.second))

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "values": list(self.values),
            "meanings": ["" if side is None else side.meaning for side in (self.first, self.second)],
        }


@dataclass(frozen=True)
class Consequence:
    """Something that follows, as text for both: ("memory per rank", "16 GB", "4 GB")."""

    what: str
    first: str
    second: str
    remark: str = ""


@dataclass(frozen=True)
class Difference:
    """``changed``: keys that somebody wrote. ``follows``: values that differ because of those. ``without_effect``: keys
    that differ and that have no effect in either run. ``remarks``: what this world hides."""

    first: Explained
    second: Explained
    changed: tuple[Change, ...] = ()
    follows: tuple[Change, ...] = ()
    without_effect: tuple[Change, ...] = ()
    consequences: tuple[Consequence, ...] = ()
    remarks: tuple[str, ...] = field(default=())

    @property
    def alike(self) -> bool:
        """Whether both mean the same run in this world."""
        return not self.changed and not self.follows

    @property
    def exit_code(self) -> int:
        """0 alike, 1 different, as `diff` has it; 2 is left to mistakes."""
        return 0 if self.alike else 1

    def to_json(self) -> dict[str, Any]:
        """What ``ptrain diff --json`` prints."""
        return {
            "files": [self.first.file, self.second.file],
            "world": self.first.world.size,
            "alike": self.alike,
            "changed": [change.to_json() for change in self.changed],
            "follows": [change.to_json() for change in self.follows],
            "without_effect": [change.to_json() for change in self.without_effect],
            "consequences": [vars(consequence) for consequence in self.consequences],
            "remarks": list(self.remarks),
        }

    def render(self, columns: int = 100) -> str:
        """For people: what was changed, what follows, what that costs."""
        columns = min(columns, 100)
        return "\n".join(line for text in _lines(self, columns) for line in text)


def diff(
    first: Source,
    second: Source,
    world: World | int | None = None,
    *,
    overrides: Overrides = (),
    lenient: bool = False,
    facts: ModelFacts | None = None,
) -> Difference:
    """What ``second`` does differently from ``first`` on so many ranks; None: the fewest that the sizes of ``first``
    fit. ``overrides`` hold for both.

    Raises: ConfigError with the problems of both files, where there are any.
    """
    sides: list[Explained] = []
    problems: list[Problem] = []
    for source in (first, second):
        try:
            explained = explain(source, world, overrides=overrides, lenient=lenient, facts=facts)
        except ConfigError as error:
            problems += error.problems
        else:
            world = world or explained.world
            problems += explained.verdict.problems
            sides.append(explained)
    if problems:
        raise ConfigError(problems)
    one, other = sides
    changed: list[Change] = []
    follows: list[Change] = []
    without_effect: list[Change] = []
    for change in _changes(one, other):
        group = without_effect if not change.has_effect else changed if change.is_written else follows
        if change.has_effect or change.is_written:
            group.append(change)
    return Difference(
        one,
        other,
        tuple(changed),
        tuple(follows),
        tuple(without_effect),
        tuple(_consequences(one.plan, other.plan, facts)),
        tuple(_remarks(one, other)),
    )


def _changes(one: Explained, other: Explained) -> Iterator[Change]:
    """Keys with other effective values. A key that one side lacks counts where it acts on the other."""
    first = {key.key: key for key in one.keys}
    second = {key.key: key for key in other.keys}
    for key in dict.fromkeys([*first, *second]):
        change = Change(key, first.get(key), second.get(key))
        if not _same(*change.values):
            yield change


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON values, where 1 and 1.0 are one number and true is none."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _remarks(one: Explained, other: Explained) -> Iterator[str]:
    """Both may agree on this number of ranks alone."""
    written = [
        tuple(name for name in BATCH_KEYS if explained.config.origin(name) == "user") for explained in (one, other)
    ]
    batches = [explained.plan.batch if explained.plan is not None else None for explained in (one, other)]
    if written[0] != written[1] and batches[0] == batches[1] and batches[0] is not None:
        given = [" and ".join(names) or "no batch key" for names in written]
        yield (
            f"The batch is the same on {plural(one.world.size, 'rank')}, and may differ on other numbers of ranks: "
            f"one file gives {given[0]}, the other {given[1]}."
        )


# --- consequences ---


def _consequences(one: Plan | None, other: Plan | None, facts: ModelFacts | None) -> Iterator[Consequence]:
    if one is None or other is None:
        return
    for what, first, second, remark in _figures(one, other, facts):
        if first != second:
            yield Consequence(what, first, second, remark)


def _figures(one: Plan, other: Plan, facts: ModelFacts | None) -> Iterator[tuple[str, str, str, str]]:
    sizes = (one.batch.global_batch_size, other.batch.global_batch_size)
    yield "samples per update", f"{sizes[0]:,}", f"{sizes[1]:,}", _factor(*sizes)
    yield _counts("tokens per update", tokens_per_step(one), tokens_per_step(other))
    rates = (peak(one), peak(other))
    yield "highest learning rate", *(ABSENT if rate is None else f"{rate:g}" for rate in rates), _factor(*rates)  # type: ignore[misc]
    yield "warm-up", _warmup(one), _warmup(other), ""
    steps = (one.config.training.steps, other.config.training.steps)
    yield _counts("updates", *steps)
    totals = [None if count is None else count * size for count, size in zip(steps, sizes, strict=True)]
    yield _counts("samples in all", *totals)
    yield _memory(one, other, facts)
    yield _traffic(one, other, facts)


def _counts(what: str, first: int | None, second: int | None) -> tuple[str, str, str, str]:
    texts = [ABSENT if count is None else f"{count:,}" for count in (first, second)]
    return what, texts[0], texts[1], _factor(first, second)


def _factor(first: float | None, second: float | None) -> str:
    if not first or not second or first == second:
        return ""
    return f"x {second / first:.3g}"


def _warmup(plan: Plan) -> str:
    params = plan.schedule.params if plan.schedule is not None else {}
    steps, length = params.get("warmup_num_steps"), plan.config.training.steps
    if not isinstance(steps, int):
        return "none"
    share = f" ({steps / length:.1%} of training)" if length and steps <= length else ""
    return f"{plural(steps, 'update')}{share}"


def _memory(one: Plan, other: Plan, facts: ModelFacts | None) -> tuple[str, str, str, str]:
    """In bytes where the size of the model is known, else in bytes per parameter."""
    what = "model states on a rank"
    if facts is None:
        sizes = [bytes_per_parameter(plan) for plan in (one, other)]
        texts = ["unknown" if size is None else f"{size:.3g} bytes per parameter" for size in sizes]
        return what, texts[0], texts[1], _factor(*sizes)
    totals = [estimate_memory(plan, facts).total_bytes for plan in (one, other)]
    texts = ["unknown" if total is None else format_bytes(total) for total in totals]
    return what, texts[0], texts[1], _factor(*totals)


def _traffic(one: Plan, other: Plan, facts: ModelFacts | None) -> tuple[str, str, str, str]:
    what = "sent by a rank per update"
    model = facts or ModelFacts(_MILLION, _MILLION)
    totals = [estimate_traffic(plan, model).total_bytes for plan in (one, other)]
    if facts is None:
        texts = [f"{total / _MILLION:.3g} bytes per parameter" for total in totals]
    else:
        texts = [format_bytes(total) for total in totals]
    return what, texts[0], texts[1], _factor(*totals)


# --- text ---


def _lines(difference: Difference, columns: int) -> Iterator[list[str]]:
    names = [short_name(side.file) for side in (difference.first, difference.second)]
    world = plural(difference.first.world.size, "rank")
    verb = "mean the same" if difference.alike else "differ"
    yield wrap(f"{names[0]} and {names[1]} {verb} on {world}.", columns, break_long_words=False)
    if difference.changed:
        yield ["", "Changed"]
        for change in difference.changed:
            yield _change(change, columns)
    if difference.follows:
        yield ["", "What follows from that"]
        for change in difference.follows:
            yield wrap(_arrow(change), columns, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    if difference.consequences:
        yield ["", "In figures"]
        width = max(len(consequence.what) for consequence in difference.consequences)
        for figure in difference.consequences:
            remark = f"  ({figure.remark})" if figure.remark else ""
            text = f"{figure.what:<{width}}  {figure.first} -> {figure.second}{remark}"
            indent = " " * (width + 4)
            yield wrap(text, columns, initial_indent="  ", subsequent_indent=indent, break_long_words=False)
    if difference.without_effect:
        yield ["", "Written differently, without effect in either"]
        for change in difference.without_effect:
            reason = next(side.reason for side in (change.first, change.second) if side is not None and side.reason)
            text = f"{_arrow(change)}: {reason}"
            yield wrap(text, columns, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    for remark in difference.remarks:
        yield ["", *wrap(remark, columns, break_long_words=False)]


def _change(change: Change, columns: int) -> list[str]:
    lines = wrap(_arrow(change), columns, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    told = [_told(side) for side in (change.first, change.second)]
    if told[0] == told[1]:
        told = [told[1]]
    for mark, text in zip("-+" if len(told) == 2 else " ", told, strict=True):
        if text:
            lines += wrap(
                text, columns, initial_indent=f"    {mark} ", subsequent_indent="      ", break_long_words=False
            )
    return lines


def _told(side: Explanation | None) -> str:
    if side is None:
        return ""
    return f"No effect: {side.reason}." if side.status == "inert" else side.meaning


def _arrow(change: Change) -> str:
    return f"{change.key}: {_shown(change.first)} -> {_shown(change.second)}"


def _shown(side: Explanation | None) -> str:
    if side is None:
        return ABSENT
    if side.status == "inert" and not side.is_written:
        return "no effect"
    value = side.value
    return f"{value:g}" if isinstance(value, float) else show(value, 40)
