"""The state a parameter has before its first step, for any optimizer.

torch's optimizers create their state inside the first `step()`. A checkpoint is loaded into existing tensors, so the
state has to exist before any step was taken, without a parameter moving by a bit.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

# Scalars that a step advances, and what they are before it. ASGD's eta starts at the group's learning rate.
_INITIAL_SCALARS = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}


@torch.no_grad()
def create_state(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    last: torch.nn.Parameter | None = None,
) -> torch.nn.Parameter | None:
    """Create ``optimizer.state[parameter]`` as it is before the parameter's first step; ``parameter`` is not touched.

    An optimizer may bring its own ``initialize_state(parameters)``. For the others a stand-in, zeros with a zero
    gradient, takes one step in the parameter's place: whatever the optimizer does to it (weight decay, momentum) stays
    zero, and what it made of the stand-in's state becomes the parameter's, its step counts set back. Memory: two
    tensors of the parameter's size. Returns the stand-in, to be passed as ``last`` of the next call: parameters of one
    shape share it, or allocating and freeing so much would leave holes in the heap.
    """
    own = getattr(optimizer, "initialize_state", None)
    if callable(own):
        own([parameter])
        return last
    fits = last is not None and _kind(last) == _kind(parameter)
    stand_in = last if fits else torch.nn.Parameter(torch.zeros_like(parameter), requires_grad=True)
    assert stand_in is not None
    if fits:
        stand_in.zero_()
    if not fits or stand_in.grad is None:
        stand_in.grad = torch.zeros_like(parameter)
    stand_in.grad.zero_()
    held = [entry["params"] for entry in optimizer.param_groups]
    try:
        for entry in optimizer.param_groups:
            entry["params"] = [stand_in] if entry is group else []
        # The bare step: hooks that users registered, and schedulers that count steps, must not see this one.
        inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        for entry, params in zip(optimizer.param_groups, held, strict=True):
            entry["params"] = params
        state = optimizer.state.pop(stand_in, None)
    if state:
        optimizer.state[parameter] = {key: _before_first_step(key, value, group) for key, value in state.items()}
    return stand_in


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _before_first_step(key: str, value: Any, group: dict[str, Any]) -> Any:
    initial = float(group["lr"]) if key == "eta" else _INITIAL_SCALARS.get(key)
    if initial is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.fill_(initial) if value.ndim == 0 else value
    return type(value)(initial)


def restore_entry(state: dict[str, Any], key: str, saved: Any) -> bool:
    """Write ``saved`` into ``state[key]`` in place. False when the shapes differ."""
    current = state[key]
    if isinstance(current, torch.Tensor):
        source = saved if isinstance(saved, torch.Tensor) else torch.tensor(saved)
        if source.shape != current.shape:
            return False
        with torch.no_grad():
            current.copy_(source)
    elif isinstance(saved, torch.Tensor):
        if saved.ndim > 0:
            return False
        state[key] = saved.item() if current is None else type(current)(saved.item())
    else:
        state[key] = saved
    return True
