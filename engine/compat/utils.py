"""What scripts import from ``deepspeed.utils``. Parameters that belong to no engine give None and take nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.data.loader import RepeatingLoader
from engine.full_state import LocalState, locate


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    place = locate(param)
    return place and place[0].full_parameter(place[1])


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    if place := locate(param):
        place[0].set_full_parameter(place[1], value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    place = _trained(param)
    return place and place[0].full_gradient(place[1])


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    if place := _trained(param):
        place[0].set_full_gradient(place[1], value)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    place = _trained(param)
    return place and place[0].full_optimizer_state(place[1], optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    if place := _trained(param):
        place[0].set_full_optimizer_state(place[1], optim_state_key, value)


def safe_update_full_grad_vectorized(params: Sequence[Tensor], update: Callable[[Tensor, Tensor], Tensor]) -> None:
    """``update(gradient, parameter)`` gives each parameter's new gradient; the collectives are shared by all."""
    by_owner: dict[LocalState, dict[str, Tensor]] = {}
    for param in params:
        if place := _trained(param):
            by_owner.setdefault(place[0], {})[place[1]] = param
    for owner, named in by_owner.items():
        gradients = owner.full_gradients(named)
        owner.set_full_gradients({name: update(gradients[name], param) for name, param in named.items()})


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's elements, flat or whole; empty where it holds none."""
    place = locate(param)
    return place and place[0].local_parameter(place[1])


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    if place := locate(param):
        place[0].set_local_parameter(place[1], value)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    place = _trained(param)
    return place and place[0].local_gradient(place[1])


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    if place := _trained(param):
        place[0].set_local_gradient(place[1], value)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    place = _trained(param)
    return place and place[0].local_optimizer_state(place[1], optim_state_key)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    if place := _trained(param):
        place[0].set_local_optimizer_state(place[1], optim_state_key, value)


def _trained(param: Tensor) -> tuple[LocalState, str] | None:
    place = locate(param)
    if place is None or place[0].parameter_registry.by_name[place[1]].group is None:
        return None
    return place


__all__ = [
    "RepeatingLoader",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]
