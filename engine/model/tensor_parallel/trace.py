"""How data flows through the linear layers of one block, and which numbers its code reads: found by running it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.tensor_parallel.capture import Call
from engine.model.tensor_parallel.matrices import Matrix, matrix_of
from engine.model.tensor_parallel.sketch import detached
from engine.torch_compat import tree_leaves, tree_map_tensors

Node = torch.autograd.graph.Node


@dataclass(frozen=True)
class Trace:
    """Names are relative to the block. ``layers``: its matrices in the order in which they ran.

    ``sources``: layer -> the layers whose outputs reach its input without another layer between (also through
    residual additions). ``last``: the layers whose outputs reach the block's own output so.
    ``numbers``: ``"attn.num_heads"`` -> value, for each integer attribute that forward read.
    """

    layers: Mapping[str, Matrix]
    sources: Mapping[str, frozenset[str]]
    last: frozenset[str]
    numbers: Mapping[str, int]
    uncalled: tuple[str, ...]
    """Matrices of the block that never ran as modules."""


def trace(block: nn.Module, call: Call) -> Trace:
    """Run ``block``, whose parameters have values, once. It is changed; give a copy that is thrown away."""
    names = {module: name for name, module in block.named_modules()}
    matrices = {module: matrix for module in names if (matrix := matrix_of(module)) is not None}
    numbers: dict[str, int] = {}
    for module, name in names.items():
        _report_reads(module, name, numbers)
    made_by: dict[Node, str] = {}
    layers: dict[str, Matrix] = {}
    sources: dict[str, set[str]] = {}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        name = names[module]
        layers[name] = matrices[module]
        sources.setdefault(name, set()).update(_nearest(args, made_by))
        if not isinstance(output, Tensor) or output.grad_fn is None:
            return output
        output = output.clone()  # no view: an operation in place would give a view another node
        made_by[output.grad_fn] = name
        return output

    for module in matrices:
        module.register_forward_hook(after)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        output = block(*tree_map_tensors(detached, call.args), **tree_map_tensors(detached, dict(call.kwargs)))
    return Trace(
        layers,
        {name: frozenset(found) for name, found in sources.items()},
        frozenset(_nearest(tree_leaves(output), made_by)),
        numbers,
        tuple(names[module] for module in matrices if names[module] not in layers),
    )


def _nearest(tensors: Iterable[Any], made_by: Mapping[Node, str]) -> set[str]:
    """The layers that made ``tensors``, each path through the autograd graph followed to the first layer on it."""
    found: set[str] = set()
    pending = [t.grad_fn for t in tree_leaves(list(tensors)) if isinstance(t, Tensor) and t.grad_fn is not None]
    visited = set(pending)
    while pending:
        node = pending.pop()
        if node in made_by:
            found.add(made_by[node])
            continue
        following = {source for source, _ in node.next_functions if source is not None} - visited
        visited |= following
        pending += following
    return found


def _report_reads(module: nn.Module, name: str, numbers: dict[str, int]) -> None:
    """Let every integer attribute of ``module`` that is read be noted under its dotted name in ``numbers``."""
    kept = vars(module)
    original = type(module)

    class Reporting(original):  # type: ignore[valid-type, misc]
        def __getattribute__(self, key: str) -> Any:
            value = super().__getattribute__(key)
            if type(value) is int and key in kept:
                numbers[f"{name}.{key}" if name else key] = value
            return value

    Reporting.__name__, Reporting.__qualname__ = original.__name__, original.__qualname__
    module.__class__ = Reporting
