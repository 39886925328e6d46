"""``tensor_parallel.plan``: which modules are cut how, by patterns of their names; and DeepSpeed's ``layer_specs``.

    "plan": {"*.q_proj": "column", "*.o_proj": "row", "*.embed_tokens": "vocabulary", "*.norm": "replicate"}

What no pattern names stays whole.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from engine.config.messages import ConfigError, Problem, show
from engine.config.sections.parallel import LayerSpecSection, PartitionConfigSection
from engine.model.tensor_parallel.matrices import describe_size, matrix_of
from engine.model.tensor_parallel.split import Split
from engine.model.tensor_parallel.written import Modules, Written, cut_as, some, why_not

PATH = "tensor_parallel.plan"
SPECS = "tensor_parallel.partition_config"
Locate = Callable[[str], tuple[str | None, int | None, int | None]]


def read_plan(model: nn.Module, plan: Mapping[str, str], locate: Locate) -> Written:
    """Match ``plan`` against the modules of ``model``.

    "sequence" cuts no parameter: `sequence_names` reads it. Raises ConfigError with every pattern that matches nothing,
    module that two patterns want differently, and module that cannot be cut as it should.
    """
    modules, problems = Modules(model), _Problems(locate, PATH)
    wanted: dict[str, tuple[str, str]] = {}  # name -> style, pattern
    for pattern, style in plan.items():
        matched = [first for name, first in modules.first.items() if name and is_named(name, pattern)]
        if not matched:
            near = modules.nearest(pattern)
            repair = f"did you mean {' or '.join(map(show, near))}?" if near else "see model.named_modules()"
            problems.add(f"{show(pattern)} matches no module of {type(model).__name__}", pattern, repair)
        for name in dict.fromkeys(matched):
            other_style, other = wanted.setdefault(name, (style, pattern))
            if other_style != style:
                problems.add(
                    f"{show(other)} cuts {name} as {other_style}, {show(pattern)} as {style}",
                    pattern,
                    "let one pattern match it",
                )
    splits: dict[str, Split] = {}
    unfit: dict[tuple[str, str], list[str]] = {}
    for name, (style, pattern) in wanted.items():
        if style in ("replicate", "sequence"):
            continue
        split = cut_as(modules[name], style)
        if split is None:
            unfit.setdefault((pattern, why_not(modules[name], style)), []).append(name)
        else:
            splits[name] = split
    for (pattern, why), names in unfit.items():
        problems.add(f"{show(pattern)} is to be cut as {plan[pattern]}, and {some(names)} {why}", pattern, _repair(why))
    problems.raise_any()
    return Written(splits, "json")


def sequence_names(model: nn.Module, plan: Mapping[str, str]) -> tuple[str, ...]:
    """The modules that ``plan`` lets work on shards of the sequence."""
    patterns = [pattern for pattern, style in plan.items() if style == "sequence"]
    return tuple(n for n, _ in model.named_modules() if n and any(is_named(n, p) for p in patterns))


def is_named(name: str, pattern: str) -> bool:
    """``*`` stands for any characters, dots included; a ``*.`` in front for nothing as well, so that a plan fits a
    model with and without a module around it."""
    return fnmatch.fnmatchcase(name, pattern) or (
        pattern.startswith("*.") and fnmatch.fnmatchcase(name, pattern.removeprefix("*."))
    )


def read_layer_specs(model: nn.Module, section: PartitionConfigSection, locate: Locate) -> Written:
    """DeepSpeed's ``partition_config``: regular expressions on parameter names, of which the first match counts.

    Raises ConfigError with all that has no meaning here.
    """
    modules, problems = Modules(model), _Problems(locate, f"{SPECS}.layer_specs")
    model_type = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    specs = [s for s in section.layer_specs if not s.model_types or model_type in map(str.lower, s.model_types)]
    notes = [
        f"layer_specs for {', '.join(spec.model_types or [])} are left out: the model is of type {model_type or '?'}"
        for spec in section.layer_specs
        if spec not in specs
    ]
    splits: dict[str, Split] = {}
    covered: set[str] = set()
    used: set[int] = set()
    for parameter, _ in model.named_parameters():
        name, _, key = parameter.rpartition(".")
        matches = [i for i, spec in enumerate(specs) if any(re.match(pattern, parameter) for pattern in spec.patterns)]
        used.update(matches)
        if not matches or (key != "weight" and name in covered):
            continue
        spec, name = specs[matches[0]], modules.first[name]
        covered.add(name)
        if len({specs[i].partition_type for i in matches}) > 1:
            notes.append(f"{parameter} matches {len(matches)} layer_specs; the first counts, as in DeepSpeed")
        if spec.partition_type != "skip" and (split := _translated(modules[name], spec, name, problems)) is not None:
            splits[name] = split
    if any(spec.grad_allreduce for spec in specs):
        notes.append("grad_allreduce is not read: which gradients are summed over the ranks is found")
    for index, spec in enumerate(specs):
        if index not in used and spec.partition_type != "skip":
            ends = [
                f".*\\{near[1:]}"
                for near in modules.nearest("*." + re.split(r"[\\.*$^]+", spec.patterns[0].strip("$"))[-1])
            ]
            repair = f"did you mean {' or '.join(map(show, ends))}?" if ends else ""
            problems.add(f"{', '.join(map(show, spec.patterns))} match no parameter", spec.patterns, repair)
    if section.strict_mode:
        rest = [n for n, m in model.named_modules() if matrix_of(m) is not None and n not in covered]
        if rest:
            problems.add(f"no spec matches {some(rest, 6)}, and strict_mode is on", repair='add a spec of type "skip"')
    problems.raise_any()
    return Written(splits, "json", notes=tuple(dict.fromkeys(notes)))


def _translated(module: nn.Module, spec: LayerSpecSection, name: str, problems: _Problems) -> Split | None:
    style: str = spec.partition_type
    if isinstance(module, nn.Embedding):
        style = "vocabulary" if (spec.partition_dim or 0) == 0 and spec.partition_type == "column" else style
    split = cut_as(module, style)
    if split is None:
        problems.add(f"{name} is to be cut as {style}, and it {why_not(module, style)}", spec.patterns, _repair(""))
        return None
    usual = 0 if spec.partition_type == "column" else 1
    dimension = usual if spec.partition_dim is None else spec.partition_dim
    shape = spec.shape or []
    if dimension != usual or len(shape) > 2 or (shape and spec.partition_type == "row"):
        problems.add(
            f"{name} ({describe_size(module)}): {spec.partition_type} with partition_dim {dimension}"
            + (f" and shape {show(shape)}" if shape else "")
            + " has no meaning for a matrix here",
            spec.patterns,
            'columns are dimension 0, of a "shape" of one or several sizes and -1; rows are dimension 1',
        )
        return None
    matrix = matrix_of(module)
    segments = () if not shape or matrix is None else _segments(shape[0], matrix.num_outputs)
    if segments is None:
        problems.add(
            f"{name} has {matrix.num_outputs if matrix else 0} outputs, which shape {show(shape)} does not divide",
            spec.patterns,
            "give sizes that add up to the outputs",
        )
        return None
    return Split(split.style, segments, split.transposed, spec.gather_output and style == "column")


def _segments(size: Any, num_outputs: int) -> tuple[int, ...] | None:
    """``3``: so many equal pieces; ``[q, k, v]``: their sizes; -1: one piece. None where they do not add up."""
    if isinstance(size, Sequence) and not isinstance(size, str):
        sizes = tuple(size)
        return sizes if all(isinstance(s, int) for s in sizes) and sum(sizes) == num_outputs else None
    if not isinstance(size, int) or size == 0:
        return None
    if size < 2:
        return ()
    return (num_outputs // size,) * size if num_outputs % size == 0 else None


def _repair(why: str) -> str:
    return 'cut it as "vocabulary"' if "by its rows" in why else "let the pattern match linear layers alone"


class _Problems:
    def __init__(self, locate: Locate, path: str) -> None:
        self._place, self._path, self._found = locate(path), path, list[Problem]()

    def add(self, message: str, found: Any = None, repair: str = "") -> None:
        file, line, column = self._place
        self._found.append(Problem(self._path, message, "value", file, line, column, found, repair=repair))

    def raise_any(self) -> None:
        if self._found:
            raise ConfigError(self._found)
