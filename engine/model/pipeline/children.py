"""Models without a list of blocks: their children are the layers, in the order in which the model calls them.

Between such layers the user's forward does more than hand on hidden states (it pools, it flattens), and what they
return differs in shape. So in front of a stage's own layers stand copies without memory, which tell the shapes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.messages import EngineError, in_one_line
from engine.torch_compat import children_of, tree_leaves, tree_map_tensors

Run = Callable[[nn.Module], Any]
"""Runs a model once, on a batch that it brings along."""


def trunk_of(model: nn.Module) -> str:
    """The name of the innermost module that holds all parameters, '' for the model itself."""
    path, trunk = "", model
    while True:
        holding = [
            (key, child)
            for key, child in children_of(trunk).items()
            if child is not None and any(True for _ in child.parameters())
        ]
        if len(holding) != 1 or any(True for _ in trunk.parameters(recurse=False)):
            return path
        key, trunk = holding[0]
        path = f"{path}.{key}" if path else key


def called_children(model: nn.Module, path: str, run: Run | None) -> tuple[str, ...]:
    """The children of module ``path`` that ``run`` calls once, in the order of the calls; in the order of registration
    where nothing can be run. What has no parameters and is called more often is none of the layers.

    Raises EngineError for a child with parameters that is called more than once.
    """
    children = {key: child for key, child in children_of(model.get_submodule(path)).items() if child is not None}
    calls = _calls(model, children, run) if run is not None else None
    counts = Counter(calls if calls is not None else list(children))
    for key, count in counts.items():
        if count > 1 and any(True for _ in children[key].parameters()):
            raise EngineError(
                f"pipeline.stages: {type(model).__name__} has no list of repeated blocks to cut between, and its child "
                f"{f'{path}.{key}' if path else key} is called {count} times in a forward, so it belongs to no one "
                "stage; give the model as engine.PipelineModule"
            )
    return tuple(key for key, count in counts.items() if count == 1)


def _calls(model: nn.Module, children: Mapping[str, nn.Module], run: Run) -> list[str] | None:
    found: list[str] = []
    handles = [
        child.register_forward_pre_hook(lambda module, args, key=key: found.append(key))
        for key, child in children.items()
    ]
    try:
        with torch.no_grad():
            run(model)
    except Exception:  # whatever it is: the order of registration is tried, and building checks that it is one
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy in fp32 and evaluation mode that takes no memory, to be called with tensors on the meta device.

    Raises EngineError for a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta", dtype=_as_fp32(tensor))
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(module, memo).eval()
    except Exception as error:
        raise EngineError(
            f"pipeline.stages: {type(module).__name__} cannot be copied ({in_one_line(error)}), and copies tell other "
            "stages its shapes; give the model as engine.PipelineModule"
        ) from error


def absent_output(layer: nn.Module, name: str, args: Any, kwargs: Any, received: Any) -> Any:
    """What another stage's layer would return for these arguments: NaN (or 0) of that shape, on the device and in the
    dtype of what this stage has ``received``. ``layer``: a `meta_copy`.

    Raises EngineError where the layer cannot be run without values.
    """
    args, kwargs = tree_map_tensors(lambda tensor: tensor.to("meta", _as_fp32(tensor)), (args, kwargs))
    try:
        with torch.no_grad():
            output = layer(*args, **kwargs)
    except Exception as error:
        raise EngineError(
            f"pipeline.stages: the shape of what {name} returns is not known on the stages behind it, for it cannot "
            f"run without values ({in_one_line(error)}); give the model as "
            "engine.PipelineModule"
        ) from error
    floats = [leaf for leaf in tree_leaves(received) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    dtype, device = (floats[0].dtype, floats[0].device) if floats else (torch.float32, torch.device("cpu"))

    return tree_map_tensors(
        lambda tensor: unusable(tensor.shape, dtype if tensor.is_floating_point() else tensor.dtype, device), output
    )


def unusable(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN (of integers 0) that takes no memory."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device).expand(shape)


def _as_fp32(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else tensor.dtype
