"""A tensor plan as lines for people: one for each kind of layer, with the number of blocks that have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from engine.model.tensor_parallel import inferred
from engine.model.tensor_parallel.matrices import describe_size, matrix_of
from engine.model.tensor_parallel.split import Split, TensorPlan
from engine.model.tensor_parallel.written import numberless

if TYPE_CHECKING:
    from engine.model.tensor_parallel.find import Kind

HOW = {
    "json": "as the config says",
    "model": "as the model's own plan says",
    "inferred": "found in the model",
}


def describe(
    model: nn.Module, plan: TensorPlan, kinds: Sequence[Kind], size: int, notes: Sequence[str]
) -> Iterator[str]:
    yield f"layers are cut over {size} ranks {HOW[plan.origin]}; proved on one block of each kind"
    for kind in kinds:
        if not kind.splits or kind.trace is None:
            continue
        where = f"{len(kind.names)} x {numberless(kind.names[0])}" if kind.names[0] else "the model"
        for part in kind.parts:
            styles = (
                ", ".join(_layer(name, kind.splits[name]) for name in names) + f" by {style}"
                for names, style in ((part.columns, "columns"), (part.rows, "rows"))
                if names
            )
            yield f"{where}: {inferred.kind_of(part, kind.trace.layers)}: {'; '.join(styles)}"
        if numbers := [f"{path} {kind.trace.numbers[path]} -> {value}" for path, value in kind.attributes.items()]:
            yield f"{where}: numbers that the code reads: {', '.join(numbers)}"
        if kind.summed:
            yield f"{where}: {', '.join(kind.summed)} whole, gradients summed over the ranks"
        whole = [name for name, _ in kind.trace.layers.items() if name not in kind.splits]
        if whole or kind.trace.uncalled:
            yield f"{where}: whole: {', '.join([*whole, *kind.trace.uncalled])}"
    for name, split in plan.splits.items():
        if split.style in ("vocabulary", "head"):
            yield f"{name} ({describe_size(model.get_submodule(name))}) by vocabulary{_parts(model, name, size)}"
    yield from notes


def _layer(name: str, split: Split) -> str:
    more = " + ".join(map(str, split.segments)) or ("gathered" if split.gather_output else "")
    return name + (f" ({more or 'of a whole input'})" if more or split.split_input else "")


def _parts(model: nn.Module, name: str, size: int) -> str:
    module = model.get_submodule(name)
    matrix = matrix_of(module)
    rows = module.num_embeddings if isinstance(module, nn.Embedding) else matrix.num_outputs if matrix else 0
    part = -(-rows // size)
    if rows % size == 0:
        return f", {part:,} a rank"
    return f", {part:,} a rank and {rows - part * (size - 1):,} on the last"
