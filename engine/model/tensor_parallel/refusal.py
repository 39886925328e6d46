"""Why a plan is refused, in sentences: what the proof stumbled on, and what in the flow of data explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from engine.model.tensor_parallel import inferred
from engine.model.tensor_parallel.inferred import Part
from engine.model.tensor_parallel.matrices import describe_size, matrix_of
from engine.model.tensor_parallel.split import Split
from engine.model.tensor_parallel.trace import Trace
from engine.model.tensor_parallel.written import Written, numberless, some
from engine.plan.findings import divisors

if TYPE_CHECKING:
    from engine.model.tensor_parallel.proof import Verdict

ORIGINS = {"json": "the plan in the config", "model": "the plan that the model brings along", "inferred": "the plan"}
WRITE = 'write "tensor_parallel.plan" ({"*.NAME": "column" | "row" | "vocabulary" | "replicate"}); the rest stays whole'


def not_proved(
    given: Written | None,
    trace: Trace,
    part: Part | None,
    splits: Mapping[str, Split],
    block: str,
    size: int,
    verdict: Verdict | None,
) -> str:
    """For a block whose output or gradients differ once it is cut. ``splits``: what was written, for explanation."""
    origin = given.origin if given is not None else "inferred"
    names = part.names if part is not None else tuple(splits)
    shown = some((f"{block}.{name}" if block else name for name in names), 6)
    tried = block or "the model"
    lines = [f"tensor_parallel: {ORIGINS[origin]} for {shown} does not hold on {size} ranks, tried on {tried}:"]
    faults = list(verdict.faults) if verdict is not None else []
    lines += [f"  {fault}" for fault in faults[:4]]
    if given is not None:
        lines += [f"  {clause}" for clause in unpaired(trace, splits)]
    if part is not None:
        lines += [
            f"  {what} ({number}) is not divisible by {size}: {_nearest(number, size)}"
            for what, number in inferred.indivisible(trace, part, size)
        ]
    if origin == "inferred":
        lines.append(f"nothing is cut on a guess: {WRITE}")
    return "\n".join(lines)


def unpaired(trace: Trace, splits: Mapping[str, Split]) -> list[str]:
    """Where a written plan breaks the rule that columns feed rows and rows are fed by columns."""
    found = []
    feeds: dict[str, list[str]] = {}
    for name, sources in trace.sources.items():
        for source in sources:
            feeds.setdefault(source, []).append(name)
    for name, split in splits.items():
        if split.style == "row" and not split.split_input:
            whole = [s for s in sorted(trace.sources.get(name, ())) if not _stays_cut(splits.get(s))]
            if whole or not trace.sources.get(name):
                fed = (
                    f"{', '.join(whole)} {'feeds' if len(whole) == 1 else 'feed'} it whole"
                    if whole
                    else "what enters it is whole"
                )
                found.append(f"{name} is cut by rows, which takes a cut input, and {fed}")
        if _stays_cut(split):
            whole = [n for n in feeds.get(name, []) if (s := splits.get(n)) is None or s.style != "row"]
            if whole or name not in feeds:
                takes = f"{', '.join(whole)} takes it whole" if whole else "no layer cut by rows takes it"
                found.append(f"{name} is cut by columns, so its output is cut, and {takes}")
    return found


def _stays_cut(split: Split | None) -> bool:
    return split is not None and split.style == "column" and not split.gather_output


def _nearest(number: int, size: int) -> str:
    fitting = divisors(number)
    below = max((d for d in fitting if d < size), default=1)
    return f"{number} = {number // size} x {size} + {number % size}; the nearest degree that divides it is {below}"


def not_proved_alone(name: str, split: Split, verdict: Verdict) -> str:
    return "\n".join(
        [f"tensor_parallel: {name}, cut as {split.style}, does not give what it gives whole:"]
        + [f"  {f}" for f in verdict.faults]
    )


def sizes(problems: Sequence[tuple[str, str]]) -> str:
    repairs = "; ".join(dict.fromkeys(repair for _, repair in problems if repair))
    return "tensor_parallel: " + "; ".join(sentence for sentence, _ in problems) + (f"; {repairs}" if repairs else "")


def open_ended(names: Sequence[str]) -> str:
    return (
        f"tensor_parallel: {some(names)} outside the repeated blocks: cut by columns its output, cut by rows its input "
        "would stay cut where the rest of the model is whole; let the plan name layers of the blocks, the token "
        "embedding and the output layer"
    )


def nothing_to_cut(model: nn.Module, traces: Sequence[Trace]) -> str:
    layers = [f"{numberless(n)} ({describe_size(m)})" for n, m in model.named_modules() if matrix_of(m) is not None]
    seen = f"it has {some(layers, 6)}" if layers else "it has no linear layers"
    never = [name for trace in traces for name in trace.uncalled]
    more = f"; {some(never)} never run as modules of their own, which hides what they do" if never else ""
    return (
        f"tensor_parallel: there is nothing to cut in {type(model).__name__}: no layers of it follow one another as "
        f"columns and rows do, and there is no token embedding; {seen}{more}; {WRITE}, or set tensor_parallel.size to 1"
    )
