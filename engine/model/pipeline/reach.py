"""Where a model cannot be cut: what a later stage would read that does not travel, found in autograd's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from engine.model.pipeline.layers import Layers
from engine.torch_compat import tree_leaves


def uncuttable(
    model: nn.Module, layers: Layers, ends: Mapping[str, str], loss: Tensor, outputs: Sequence[Any]
) -> list[tuple[int, str]]:
    """Behind how many layers the model cannot be cut, and the first thing that is read there past the cut.

    ``outputs``: what each layer returned on the way to ``loss``. ``ends``: see `ModelFacts.ends`. What gradients do not
    flow through is not seen here; a run sees it in its first micro-batch (cut.py).
    """
    nodes = [{leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)} - {None} for output in outputs]
    names: dict[Tensor, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    found = []
    for end in range(1, len(nodes)):
        earlier = {node: at for at in range(end - 1) for node in nodes[at] - nodes[end - 1]}
        for node in _walk(loss.grad_fn, nodes[end - 1]):
            own = names.get(getattr(node, "variable", None), set())  # type: ignore[arg-type]
            if node in earlier:
                found.append((end, f"what {layers.name(earlier[node])} returns"))
            elif own and all(_is_in_front(layers, ends, name, end) for name in own):
                found.append((end, min(own)))
            else:
                continue
            break
    return found


def _is_in_front(layers: Layers, ends: Mapping[str, str], name: str, end: int) -> bool:
    position = layers.position_of(name)
    return ends.get(name) == "first" if position is None else position < end


def _walk(start: Any, stop: set[Any]) -> Iterator[Any]:
    """The nodes of the graph from ``start`` back to ``stop``."""
    waiting, seen = [start], set(stop)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)
