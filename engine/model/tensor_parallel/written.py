"""Which modules a written plan names, and how it wants them cut; what JSON and a model's own plan are read into."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from engine.model.tensor_parallel.matrices import describe_size, matrix_of
from engine.model.tensor_parallel.split import Origin, Split


@dataclass(frozen=True)
class Written:
    """Module name -> how it is to be cut. ``origin``: whose plan it is; ``notes``: sentences for the printed plan."""

    splits: Mapping[str, Split]
    origin: Origin
    attributes: Mapping[str, int] | None = None
    """As in `TensorPlan`, where the plan says them; None: they are found."""
    notes: tuple[str, ...] = ()


@dataclass
class Modules:
    """The modules of a model by every name they have; a module that has several is known by the first."""

    model: nn.Module
    first: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: dict[nn.Module, str] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            self.first[name] = known.setdefault(module, name)

    def __getitem__(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def nearest(self, pattern: str, count: int = 3) -> list[str]:
        """Patterns that do match and look like ``pattern``."""
        names = [name for name in self.first if name]
        ends = [f"*.{name.rpartition('.')[2]}" for name in names if "." in name and not name[-1].isdigit()]
        return difflib.get_close_matches(pattern, dict.fromkeys([*ends, *map(numberless, names)]), count, 0.6)


def numberless(name: str) -> str:
    """``h.0.attn`` -> ``h.*.attn``."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def some(names: Iterable[str], count: int = 3) -> str:
    """The first names, and how many more there are. Names that differ in a block's number only count as one."""
    kinds = list(dict.fromkeys(numberless(name) for name in names))
    return ", ".join(kinds[:count]) + (f" and {len(kinds) - count} more" if len(kinds) > count else "")


def cut_as(module: nn.Module, style: str) -> Split | None:
    """The split of a module in the style that a plan writes (column, row, vocabulary); None where it has no such."""
    matrix = matrix_of(module)
    if isinstance(module, nn.Embedding):
        return Split("vocabulary") if style == "vocabulary" else None
    if matrix is None:
        return None
    if style == "vocabulary":
        return Split("head", transposed=matrix.transposed)
    return Split(style, transposed=matrix.transposed)  # type: ignore[arg-type]


def why_not(module: nn.Module, style: str) -> str:
    """Why `cut_as` gave None, as a clause."""
    what = describe_size(module)
    if isinstance(module, nn.Embedding):
        return f"is an {what}, which is cut by its rows"
    return f"is a {what}, which has no matrix of its own to cut ({style} cuts linear layers)"
