"""This rank's own part of parameters, gradients and optimizer state, by name: for what needs no whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.contracts import EngineError
from engine.full_state.access import FullState
from engine.full_state.foreign_clipping import watch_clipping
from engine.full_state.owners import engines

if TYPE_CHECKING:
    from engine.model.zero.shards import ParameterShard


class LocalState(FullState):
    """Local tensors are flat and live: this rank's elements of a parameter in row-major order; it may hold none.

    Calls on gradients and setters are made by all ranks, as they reduce or publish; each gives its own part.
    """

    def _share_state(self) -> None:
        """Let the optimizer, and interfaces that take parameter objects, find their way here."""
        engines.add(self)
        watch_clipping()
        self._bind_optimizer()

    def local_parameter(self, name: str) -> Tensor:
        """This rank's elements of the master."""
        shard = self._local(name)
        return torch.empty(0) if shard is None else shard.parameter.detach().view(-1)

    @torch.no_grad()
    def set_local_parameter(self, name: str, value: Tensor) -> None:
        self._agree_on("set_local_parameter", [name])
        self._bring_together()
        _write(name, self.local_parameter(name), value)
        self.roles.reduction.publish()

    @torch.no_grad()
    def local_gradient(self, name: str) -> Tensor:
        """A copy, in the units of `full_gradients`."""
        divisor = self._begin_gradients("local_gradient", [name])
        shard = self._local(name, trained=True)
        if shard is None or shard.parameter.grad is None:
            return torch.empty(0) if shard is None else torch.zeros(shard.parameter.numel())
        return shard.parameter.grad.reshape(-1) / divisor

    @torch.no_grad()
    def set_local_gradient(self, name: str, value: Tensor) -> None:
        divisor = self._begin_gradients("set_local_gradient", [name])
        shard = self._local(name, trained=True)
        if shard is not None:
            if shard.parameter.grad is None:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
            _write(name, shard.parameter.grad.view(-1), value * divisor)
        self.roles.reduction.adopt_gradients({self.parameter_registry.by_name[name].index})

    def local_optimizer_state(self, name: str, key: str) -> Tensor:
        """This rank's elements of the state ``key``; one that is not shaped like the parameter comes as it is."""
        shard = self._local(name, trained=True)
        if shard is None:
            return torch.empty(0)
        state = self._optimizer().named_state().get(name, {})
        if key not in state:
            raise EngineError(f"the optimizer has no state {key!r} for {name}; it has {', '.join(state) or 'none yet'}")
        held = torch.as_tensor(state[key])
        return held.view(-1) if held.shape == shard.parameter.shape else held

    @torch.no_grad()
    def set_local_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        self._optimizer().initialize_state([name])
        _write(f"{key} of {name}", self.local_optimizer_state(name, key), value)

    def _local(self, name: str, trained: bool = False) -> ParameterShard | None:
        (info,) = (self._trained([name]) if trained else self._infos([name])).values()
        return next((shard for shard in self._all_shards() if shard.info.index == info.index), None)


def _write(what: str, held: Tensor, value: Tensor) -> None:
    if held.numel() != value.numel():
        raise EngineError(f"this rank holds {held.numel()} elements of {what}, and {value.numel()} were given")
    held.copy_(value.detach().reshape(held.shape))
