"""How a model is cut over the tp axis: found in the JSON, in the model's own plan, or in the model; and proved.

found = find_plan(model, blocks, mesh, config)
print("\n".join(found.lines))
apply(model, found.plan, ...)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from engine.collectives.objects import ObjectGroup
from engine.config.messages import EngineError
from engine.config.sections.parallel import TensorParallelSection
from engine.cut import Cut
from engine.mesh import Mesh
from engine.model.tensor_parallel import inferred, refusal
from engine.model.tensor_parallel.capture import Call, capture
from engine.model.tensor_parallel.cuts import parameter_cuts
from engine.model.tensor_parallel.describe import describe
from engine.model.tensor_parallel.inferred import Part
from engine.model.tensor_parallel.json_plan import Locate, read_layer_specs, read_plan
from engine.model.tensor_parallel.matrices import matrix_of
from engine.model.tensor_parallel.model_plan import own_plan, read_model_plan
from engine.model.tensor_parallel.outside import call_alone, find_vocabulary
from engine.model.tensor_parallel.proof import Proof, Verdict
from engine.model.tensor_parallel.sizes import split_sizes
from engine.model.tensor_parallel.sketch import Sketch
from engine.model.tensor_parallel.split import Split, TensorPlan
from engine.model.tensor_parallel.trace import Trace, trace
from engine.model.tensor_parallel.written import Written
from engine.parameters import ParameterRegistry
from engine.plan.tensor_parallel import split_problems

T = TypeVar("T")
PLACE = re.compile(r"(idx|index|_id|_number|depth)$")
"""Attributes that say which of the blocks a block is."""


@dataclass(frozen=True)
class Found:
    """A plan that was proved. ``lines``: what is printed of it."""

    plan: TensorPlan
    lines: tuple[str, ...]


@dataclass
class Kind:
    """Blocks that are alike: same class, same shapes, cut alike. ``names`` are theirs in the model; the rest is of the
    first of them, its names relative to it."""

    names: list[str]
    splits: dict[str, Split] = field(default_factory=dict)
    attributes: dict[str, int] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    parts: list[Part] = field(default_factory=list)
    trace: Trace | None = None


def find_plan(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    settings: TensorParallelSection | None = None,
    locate: Locate = lambda path: (None, None, None),
    sample: Any = None,
) -> Found:
    """The plan for ``model``, which may be on the meta device and is not touched. Collective over all ranks.

    ``blocks``: what `engine.model.blocks` found. ``sample``: a batch as the model takes it, for the small forward that
    the proof needs; without one, token ids or numbers are made up.

    Raises EngineError, the same on all ranks: ConfigError for a plan in the JSON that does not fit the model; a plan
    that the proof does not bear out, with the names it stumbled on; a model with nothing to cut.
    """
    size = mesh.degrees["tp"]
    given = _together(mesh, "reading the plan", lambda: given_plan(model, settings, locate))
    if given is not None and given.splits:
        written = TensorPlan(given.splits, given.attributes or {})
        _together(mesh, "reading the plan", lambda: parameter_cuts(model, ParameterRegistry(model), written, size, 0))
    if heads_must_divide(model, given):
        sizes = split_sizes(model, blocks)
        if problems := split_problems(sizes, size):
            raise EngineError(refusal.sizes(problems))
    if not any(matrix_of(module) or isinstance(module, nn.Embedding) for module in model.modules()):
        raise EngineError(refusal.nothing_to_cut(model, ()))
    with_head = settings is None or settings.vocab_parallel_lm_head is not False
    search = _Search(model, _units(model, blocks), mesh, with_head)
    kinds = _together(mesh, "running one block by itself", lambda: search.kinds(given, sample))
    for kind in kinds:
        search.settle(kind, given)
    outer = search.outer(given)
    plan = _assemble(kinds, outer, given)
    if not plan.splits:
        raise EngineError(refusal.nothing_to_cut(model, [kind.trace for kind in kinds if kind.trace]))
    return Found(plan, tuple(describe(model, plan, kinds, size, given.notes if given else ())))


def given_plan(model: nn.Module, settings: TensorParallelSection | None, locate: Locate) -> Written | None:
    """The written plan with the first claim: of the JSON, else of the model; None where neither has one.

    A model's own is its attribute ``tensor_plan`` (a `TensorPlan`), else what transformers' models carry.
    """
    exact = getattr(model, "tensor_plan", None)
    if exact is not None and not isinstance(exact, TensorPlan):
        raise EngineError(
            f"{type(model).__name__}.tensor_plan is a {type(exact).__name__}; it is taken for an "
            "engine.model.tensor_parallel.TensorPlan, so give it another name or make it one"
        )
    if settings is not None and settings.plan:
        return read_plan(model, settings.plan, locate)
    own = own_plan(model)
    if settings is not None and settings.partition_config is not None and settings.partition_config.layer_specs:
        return read_layer_specs(model, settings.partition_config, locate)
    if exact is not None:
        return Written(exact.splits, "model", exact.attributes)
    return read_model_plan(model, own) if own else None


def heads_must_divide(model: nn.Module, given: Written | None) -> bool:
    """Not with a plan of the JSON, which may leave attention whole, nor with one of the model's that makes outputs
    whole again inside the blocks."""
    if given is None:
        return True
    outer = find_vocabulary(model, ())
    gathers = any(split.gather_output for name, split in given.splits.items() if name not in outer)
    return given.origin == "model" and not gathers


def _units(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """What is proved as one: the blocks and others of their class (an encoder's beside a decoder's); without blocks,
    the model."""
    classes = {type(block) for block in blocks}
    units = {name: module for name, module in model.named_modules() if name and type(module) in classes}
    return units or {"": model}


class _Search:
    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], mesh: Mesh, with_head: bool) -> None:
        self._model, self._units, self._mesh, self._with_head = model, units, mesh, with_head
        self._size = mesh.degrees["tp"]
        self._sketch = _together(mesh, "copying the model", lambda: Sketch(model, mesh.device))
        self._calls: dict[str, Call] = {}

    def kinds(self, given: Written | None, sample: Any) -> list[Kind]:
        """Units grouped by what they are and how they are to be cut; each kind's inputs captured and its data flow
        traced."""
        found: dict[Any, Kind] = {}
        for name, unit in self._units.items():
            splits = {} if given is None else _within(name, given.splits)
            shapes = tuple((path, tuple(p.shape)) for path, p in unit.named_parameters())
            key = (type(unit), shapes, numbers_of(unit), frozenset(splits.items()))
            kind = found.setdefault(key, Kind([], splits))
            kind.names.append(name)
        kinds = [kind for kind in found.values() if given is None or kind.splits]
        if kinds:
            self._calls = capture(self._sketch, [kind.names[0] for kind in kinds], sample)
        for kind in kinds:
            block = self._sketch.model.get_submodule(kind.names[0])
            self._sketch.fill(block)
            kind.trace = trace(copy.deepcopy(block), self._calls[kind.names[0]])
            self._sketch.hollow(block)
        return kinds

    def settle(self, kind: Kind, given: Written | None) -> None:
        """Find how fused outputs are divided and which numbers shrink, part by part, and prove the whole."""
        assert kind.trace is not None
        name, written = kind.names[0], dict(kind.splits)
        kind.splits = {}
        kind.parts = (
            inferred.find_parts(kind.trace)
            if given is None
            else inferred.group(kind.trace, {key: split.style for key, split in written.items()})
        )
        block = self._sketch.model.get_submodule(name)
        self._sketch.fill(block)
        proof = Proof(block, self._calls[name], self._mesh, name)
        exact = given is not None and given.attributes is not None
        for part in [_merged(kind.parts)] if exact and kind.parts else kind.parts:
            first: Verdict | None = None
            for splits, numbers in self._choices(kind, part, written, given):
                verdict = proof(TensorPlan(kind.splits | splits, kind.attributes | numbers))
                first = first or verdict
                if not verdict.faults:
                    kind.splits |= splits
                    kind.attributes |= numbers
                    break
            else:
                raise EngineError(refusal.not_proved(given, kind.trace, part, written, name, self._size, first))
        if kind.splits:
            verdict = proof(TensorPlan(kind.splits, kind.attributes))
            if verdict.faults:
                raise EngineError(refusal.not_proved(given, kind.trace, None, kind.splits, name, self._size, verdict))
            kind.summed = verdict.summed
            verdict = proof(TensorPlan(kind.splits, kind.attributes, summed=kind.summed))
            if verdict.faults or verdict.summed:
                raise EngineError(refusal.not_proved(given, kind.trace, None, kind.splits, name, self._size, verdict))
        self._sketch.hollow(block)

    def _choices(
        self, kind: Kind, part: Part, written: Mapping[str, Split], given: Written | None
    ) -> Iterator[tuple[dict[str, Split], dict[str, int]]]:
        assert kind.trace is not None
        if given is not None and given.attributes is not None:
            begin = f"{kind.names[0]}." if kind.names[0] else ""
            near = {path.removeprefix(begin): v for path, v in given.attributes.items() if path.startswith(begin)}
            yield {name: written[name] for name in part.names}, near
            return
        for splits in inferred.layouts(kind.trace, part, written):
            for numbers in inferred.divided_numbers(kind.trace, part, splits, self._size, kind.attributes):
                yield splits, numbers

    def outer(self, given: Written | None) -> dict[str, Split]:
        """What is cut over the vocabulary, and whatever else a written plan cuts outside the blocks; each layer is
        proved alone."""
        inside = {module for name, unit in self._units.items() if name for module in unit.modules()}
        vocabulary = {
            name: split
            for name, split in find_vocabulary(self._model, inside, self._with_head).items()
            if is_shared_by(self._size, self._model.get_submodule(name), split)
        }
        splits = (
            vocabulary
            if given is None
            else _together(self._mesh, "reading the plan", lambda: self._written(given, vocabulary))
        )
        for name, split in splits.items():
            module = self._sketch.model.get_submodule(name)
            self._sketch.fill(module)
            proof = Proof(module, call_alone(module, self._size, self._mesh.device), self._mesh, name)
            verdict = proof(TensorPlan({"": split}))
            self._sketch.hollow(module)
            if verdict.faults or verdict.summed:
                raise EngineError(refusal.not_proved_alone(name, split, verdict))
        return splits

    def _written(self, given: Written, vocabulary: Mapping[str, Split]) -> dict[str, Split]:
        """A written plan's layers outside the blocks. One of a token embedding and an output layer that share their
        weight takes the other along."""
        splits, open_ended = {}, []
        for name, split in given.splits.items():
            if split.style in ("vocabulary", "head") or name in vocabulary:
                splits[name] = vocabulary.get(name, split) if split.style == "column" else split
            elif not any(_inside(name, unit) for unit in self._units):
                if (split.style == "column" and not split.gather_output) or (
                    split.style == "row" and not split.split_input
                ):
                    open_ended.append(name)
                splits[name] = split
        if open_ended:
            raise EngineError(refusal.open_ended(open_ended))
        for name in [name for name in vocabulary if name not in splits]:
            weight = self._model.get_submodule(name).weight
            if any(self._model.get_submodule(other).weight is weight for other in splits):
                splits[name] = vocabulary[name]
        return splits


def numbers_of(unit: nn.Module) -> tuple[tuple[str, int], ...]:
    """The integer attributes of its modules but for a block's place among the blocks: blocks that differ in one (heads
    of another number and size, in matrices of the same shape) are of different kinds."""
    return tuple(
        (f"{name}.{key}", value)
        for name, module in unit.named_modules()
        for key, value in vars(module).items()
        if type(value) is int and not PLACE.search(key)
    )


def is_shared_by(size: int, layer: nn.Module, split: Split) -> bool:
    """Whether each of ``size`` ranks gets rows of the vocabulary."""
    shape: torch.Size = layer.weight.shape  # type: ignore[assignment]
    dimension = int(split.transposed)
    return Cut(tuple(shape), dimension, (shape[dimension],), size, size - 1).extent() > 0


def _assemble(kinds: Sequence[Kind], outer: Mapping[str, Split], given: Written | None) -> TensorPlan:
    splits, summed = dict(outer), list[str]()
    attributes: dict[str, int] = {}
    for kind in kinds:
        for block in kind.names:
            splits |= {_joined(block, name): split for name, split in kind.splits.items()}
            attributes |= {_joined(block, path): value for path, value in kind.attributes.items()}
            summed += [_joined(block, name) for name in kind.summed]
    if given is not None and given.attributes is not None:
        attributes = dict(given.attributes)
    return TensorPlan(
        splits, attributes, summed=tuple(summed), origin=given.origin if given is not None else "inferred"
    )


def _merged(parts: Sequence[Part]) -> Part:
    return Part(tuple(n for part in parts for n in part.columns), tuple(n for part in parts for n in part.rows))


def _joined(block: str, name: str) -> str:
    return ".".join(part for part in (block, name) if part)


def _inside(name: str, unit: str) -> bool:
    return not unit or name.startswith(f"{unit}.")


def _within(unit: str, splits: Mapping[str, Split]) -> dict[str, Split]:
    """The splits of layers inside a unit, by their names in it."""
    cut = len(unit) + 1 if unit else 0
    return {
        name[cut:]: split
        for name, split in splits.items()
        if _inside(name, unit) and split.style not in ("vocabulary", "head")
    }


def _together(mesh: Mesh, what: str, task: Callable[[], T]) -> T:
    """Run ``task`` on every rank; where it fails on one, all raise what the first of them found."""
    result, error = None, None
    try:
        result = task()
    except EngineError as found:
        error = found
    except Exception as found:
        error = EngineError(
            f"tensor_parallel: {what} failed, so that no plan can be proved: {type(found).__name__}: {found}"
        )
    if mesh.world_size > 1:
        errors = ObjectGroup(mesh.control_group).gather_everywhere(error)
        error = next((found for found in errors if found is not None), None)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
