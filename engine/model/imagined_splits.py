"""How tensor parallelism would cut a model that exists without memory: as a plan says, or as the data flow suggests.

Unproved: training proves a plan on real ranks first (engine/model/tensor_parallel/proof.py). Of the ways in which a
fused output may be divided this takes the likeliest; all of them leave a rank with as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from engine.model.tensor_parallel import inferred
from engine.model.tensor_parallel.capture import Call
from engine.model.tensor_parallel.outside import find_vocabulary
from engine.model.tensor_parallel.split import Split
from engine.model.tensor_parallel.trace import trace
from engine.model.tensor_parallel.written import Written
from engine.torch_compat import tree_map_tensors

LossOf = Callable[[nn.Module], Tensor]


def imagined_splits(
    model: nn.Module, blocks: Sequence[nn.Module], written: Written | None, loss_of: LossOf | None
) -> dict[str, Split]:
    """Module name -> how it is cut. ``loss_of`` runs the model, which inferring a plan needs where none is ``written``
    and which changes it: give a model that is thrown away."""
    inside = {module for block in blocks for module in block.modules()}
    vocabulary = find_vocabulary(model, inside)
    if written is not None:
        splits = {name: vocabulary.get(name, split) for name, split in written.splits.items()}
        tied = {model.get_submodule(name).weight for name in splits if name in vocabulary}
        return splits | {n: s for n, s in vocabulary.items() if model.get_submodule(n).weight in tied}
    splits = dict(vocabulary)
    if loss_of is None:
        return splits
    names = {module: name for name, module in model.named_modules()}
    kinds: dict[Any, dict[str, Split]] = {}
    calls = _first_calls(model, blocks, loss_of)
    for block in blocks:
        kind = type(block), tuple((key, tuple(p.shape)) for key, p in block.named_parameters())
        if kind not in kinds and block in calls:
            kinds[kind] = _inferred(block, calls[block])
        splits |= {f"{names[block]}.{name}": split for name, split in kinds.get(kind, {}).items()}
    return splits


def cut_dimensions(model: nn.Module, splits: Mapping[str, Split]) -> dict[str, int]:
    """Parameter name -> the dimension along which each rank has a part."""
    found = {}
    for name, split in splits.items():
        module = model.get_submodule(name)
        inputs = int(not split.transposed)
        found[f"{name}.weight"] = inputs if split.style == "row" else 1 - inputs
        if split.style != "row" and getattr(module, "bias", None) is not None:
            found[f"{name}.bias"] = 0
    return found


def _inferred(block: nn.Module, call: Call) -> dict[str, Split]:
    found = trace(block, call)
    splits: dict[str, Split] = {}
    for part in inferred.find_parts(found):
        splits |= next(inferred.layouts(found, part, {}), {})
    return splits


class _Enough(BaseException):
    """Every block has been called; no ``except Exception`` of a model may catch it."""


def _first_calls(model: nn.Module, blocks: Sequence[nn.Module], loss_of: LossOf) -> dict[nn.Module, Call]:
    """What each block is called with in one forward."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] = Call(tree_map_tensors(_leaf, args), tree_map_tensors(_leaf, kwargs))
        if len(calls) == len(blocks):
            raise _Enough

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        loss_of(model)
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
