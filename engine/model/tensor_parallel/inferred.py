"""Which layers of a block are cut how, read from the way data flows through it, its shapes and the names in it.

A layer that takes what is whole and feeds only layers that close the pair is cut by columns; a layer all of whose
inputs come from such layers is cut by rows, and sums over the ranks (Megatron-LM, https://arxiv.org/abs/1909.08053).
Query, key and value are columns before the row of attention's output; up and gate are columns before the row of down.
What stays open (how a fused output is divided, which numbers the code reads) is a list of choices for `proof` to judge.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.model.tensor_parallel.matrices import Matrix
from engine.model.tensor_parallel.split import Split
from engine.model.tensor_parallel.trace import Trace

MAX_CHOICES = 64
"""Combinations of divided numbers that are tried on one pair of layers before it is given up."""

HEADS = re.compile(r"^((num|n)_?)?((attention|attn|query|q|key_value|kv|key|k|value|v)_?)*(heads?|h)(_per_partition)?$")
KEPT = re.compile(
    r"head_?(dim|size)|dim_?head|d_?head|d_kv|kv_channels|proj_dim|groups|layer|rotary|window|max_|bucket"
)
RESIDUAL = re.compile(r"^(hidden_?(size|dim)?|d_model|width|dim|n_embd|n_embed|model_dim|embed_dim|channels)$")


@dataclass(frozen=True)
class Part:
    """Layers of a block that are cut together: the ``columns`` feed the ``rows``, and nothing else does."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, *self.rows)

    @property
    def root(self) -> str:
        """The innermost module that holds all of them, "" for the block."""
        split = [name.split(".")[:-1] for name in self.names]
        return ".".join(
            level[0] for level in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*split, strict=False))
        )


def find_parts(trace: Trace) -> list[Part]:
    """The parts of a block, in the order in which they run. Layers in none stay whole."""
    styles: dict[str, str] = {}
    for name in trace.layers:
        above = {styles[source] for source in trace.sources[name]}
        styles[name] = "column" if above <= {"row"} else "row" if above == {"column"} else "whole"
    feeds: dict[str, set[str]] = {name: set() for name in trace.layers}
    for name, sources in trace.sources.items():
        for source in sources:
            feeds[source].add(name)
    changed = True
    while changed:
        changed = False
        for name, style in styles.items():
            if style == "column":
                closed = feeds[name] and name not in trace.last and all(styles[n] == "row" for n in feeds[name])
            else:
                closed = all(styles[source] == "column" for source in trace.sources[name])
            if style != "whole" and not closed:
                styles[name], changed = "whole", True
    return group(trace, {name: style for name, style in styles.items() if style != "whole"})


def group(trace: Trace, styles: Mapping[str, str]) -> list[Part]:
    """Layers whose styles are given, gathered into parts: rows with the columns that feed them. Layers that neither
    feed nor are fed by another make a part of their own."""
    together: dict[str, set[str]] = {name: {name} for name in styles}
    for name, style in styles.items():
        for source in trace.sources.get(name, ()) if style == "row" else ():
            if styles.get(source) == "column":
                merged = together[name] | together[source]
                for member in merged:
                    together[member] = merged
    order = {name: index for index, name in enumerate(trace.layers)}
    parts = {tuple(sorted(names, key=lambda n: order.get(n, 0))) for names in together.values()}
    return [
        Part(tuple(n for n in names if styles[n] == "column"), tuple(n for n in names if styles[n] == "row"))
        for names in sorted(parts, key=lambda names: order.get(names[0], 0))
    ]


def layouts(trace: Trace, part: Part, given: Mapping[str, Split]) -> Iterator[dict[str, Split]]:
    """The ways in which the outputs of the part's columns may be divided, the likeliest first."""
    widths = {trace.layers[row].num_inputs for row in part.rows}
    choices = []
    for name in part.columns:
        split = given.get(name, Split("column", transposed=trace.layers[name].transposed))
        fused = (
            [] if split.segments or split.gather_output or len(widths) != 1 else _fused(trace, name, next(iter(widths)))
        )
        choices.append(
            [(name, Split(split.style, s, split.transposed, split.gather_output)) for s in fused] or [(name, split)]
        )
    for chosen in itertools.product(*choices):
        rows = {name: given.get(name, Split("row", transposed=trace.layers[name].transposed)) for name in part.rows}
        yield dict(chosen) | rows


def _fused(trace: Trace, name: str, width: int) -> list[tuple[int, ...]]:
    """Sizes of the pieces of a fused output whose consumer takes ``width``; () is one piece (heads after another, each
    with its own query, key and value)."""
    outputs = trace.layers[name].num_outputs
    if outputs <= width:
        return []
    found: list[tuple[int, ...]] = []
    if outputs % width == 0:
        found.append((width,) * (outputs // width))
    elif outputs < 3 * width and (outputs - width) % 2 == 0:
        found.append((width, (outputs - width) // 2, (outputs - width) // 2))
    if outputs % width == 0 and outputs // width == 2:
        found.append((width, width // 2, width // 2))
    return [*found, ()]


def divided_numbers(
    trace: Trace, part: Part, splits: Mapping[str, Split], size: int, settled: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Which integer attributes become 1/``size`` of themselves, the likeliest choice first: ``{"attn.heads": 2}``.

    Only what forward read counts. ``settled``: those that were decided with another part.
    """
    sure, likely, possible = {}, {}, {}
    widths = _widths(trace, part, splits)
    for path, value in trace.numbers.items():
        owner, _, key = path.rpartition(".")
        if path in settled or value < 2 or value % size or not _is_near(owner, part.root):
            continue
        if owner in trace.layers:
            if owner in part.columns and value == trace.layers[owner].num_outputs:
                sure[path] = value // size
        elif HEADS.search(key.lower()):
            likely[path] = value // size
        elif KEPT.search(key.lower()):
            continue
        elif value in widths and not RESIDUAL.search(key.lower()):
            likely[path] = value // size
        elif value in widths or any(width % value == 0 for width in widths):
            possible[path] = value // size
    open_paths = [*likely, *possible]
    flips = itertools.chain.from_iterable(
        itertools.combinations(open_paths, count) for count in range(len(open_paths) + 1)
    )
    for flipped in itertools.islice(flips, MAX_CHOICES):
        chosen = (set(likely) - set(flipped)) | (set(possible) & set(flipped))
        yield sure | {path: value for path, value in (likely | possible).items() if path in chosen}


def _widths(trace: Trace, part: Part, splits: Mapping[str, Split]) -> set[int]:
    widths = {trace.layers[row].num_inputs for row in part.rows}
    for name in part.columns:
        widths |= {trace.layers[name].num_outputs, *splits[name].segments}
    return widths


def _is_near(owner: str, root: str) -> bool:
    """Whether a module holds or lies in the one that holds the part."""
    return not owner or not root or owner == root or owner.startswith(f"{root}.") or root.startswith(f"{owner}.")


def indivisible(trace: Trace, part: Part, size: int) -> list[tuple[str, int]]:
    """``(what, number)`` of the numbers of heads and widths that ``size`` does not divide."""
    found = [
        (path, value)
        for path, value in trace.numbers.items()
        if HEADS.search(path.rpartition(".")[2].lower())
        and value % size
        and _is_near(path.rpartition(".")[0], part.root)
    ]
    for name in part.columns:
        found += [(f"the outputs of {name}", trace.layers[name].num_outputs)] * bool(
            trace.layers[name].num_outputs % size
        )
    for name in part.rows:
        found += [(f"the inputs of {name}", trace.layers[name].num_inputs)] * bool(trace.layers[name].num_inputs % size)
    return found


def kind_of(part: Part, layers: Mapping[str, Matrix]) -> str:
    """ "attention" or "MLP", for people."""
    width = layers[part.rows[0]].num_inputs if part.rows else 0
    fused = any(layers[name].num_outputs in (3 * width,) for name in part.columns)
    named = any(re.search("att", name.lower()) for name in part.names)
    return "attention" if fused or named or len(part.columns) > 2 else "MLP"
