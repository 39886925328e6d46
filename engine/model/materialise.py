"""Make a model real: give meta parameters values, and give every rank the same ones.

Values come from random streams keyed by (seed, module name), so every split of a model starts equal and no rank
needs more of it at once than the modules it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from engine.config.messages import EngineError
from engine.parameters import ParameterRegistry
from engine.random import stream_seed


class Materialiser:
    """Call it with modules; afterwards their parameters and buffers are on ``device`` and equal on all ranks.

    ``broadcast`` sends rank 0's values (a no-op in one process); ``dtype_of`` says how a parameter is stored.
    A module is done once, with everything below it that is not done yet.

    Meta parameters are filled as the model's own constructor would: `reset_parameters` of each module, then the
    model's `_init_weights(module)` (Hugging Face's convention), inner modules first. A module around the ``blocks`` is
    initialised for its own parameters only, since the blocks may be sharded by then.

    Raises EngineError for meta parameters that neither of the two fills.
    """

    def __init__(
        self,
        model: nn.Module,
        registry: ParameterRegistry,
        blocks: Iterable[nn.Module],
        device: torch.device,
        seed: int,
        broadcast: Callable[[Tensor], None],
        dtype_of: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self._model, self._registry, self._device, self._seed = model, registry, device, seed
        self._broadcast, self._dtype_of = broadcast, dtype_of
        self._names = {module: name for name, module in model.named_modules()}
        inside = {module for block in blocks for module in block.modules()}
        self._around = {m for m in model.modules() if m not in inside and not inside.isdisjoint(m.modules())}
        self._done: set[nn.Module] = set()
        self._real: dict[nn.Parameter, nn.Parameter] = {}
        self._placed: set[nn.Parameter] = set()

    @torch.no_grad()
    def __call__(self, modules: Sequence[nn.Module]) -> None:
        for root in modules:
            fresh = [module for module in root.modules() if module not in self._done]
            self._done.update(fresh)
            to_fill = [m for m in fresh if _meta(m, recurse=m not in self._around)]
            for module in to_fill:
                self._allocate(module)
            for module in reversed(to_fill):
                self._initialise(module)
            for module in fresh:
                self._place(module, broadcast=module not in to_fill)

    def _allocate(self, module: nn.Module) -> None:
        """Real storage for a module's own meta parameters and buffers; its own initialisation, if it has one."""
        meta = _meta(module, recurse=False)
        if not meta:
            return
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in self._real:
                self._real[parameter] = nn.Parameter(
                    torch.empty_like(parameter, device=self._device), parameter.requires_grad
                )
                self._registry.replace(parameter, self._real[parameter])
            setattr(module, key, self._real[parameter])
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, torch.empty_like(buffer, device=self._device))
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            with self._stream(module, "reset_parameters"):
                reset()
        elif not callable(getattr(self._model, "_init_weights", None)):
            name = self._names[module] or "the model"
            raise EngineError(
                f"{name} ({type(module).__name__}) was built on the meta device and nothing can fill "
                f"{', '.join(meta)}: give the class a reset_parameters() method, or the model an _init_weights(module) "
                "method, or build the model on the CPU"
            )

    def _initialise(self, module: nn.Module) -> None:
        initialise = getattr(self._model, "_init_weights", None)
        if callable(initialise):
            with self._stream(module, "init_weights"):
                initialise(module)

    def _place(self, module: nn.Module, broadcast: bool) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in self._placed:
                continue
            self._placed.add(parameter)
            dtype = self._dtype_of(parameter.dtype)
            if parameter.device != self._device or parameter.dtype != dtype:
                parameter.data = parameter.data.to(self._device, dtype)
            if broadcast:
                self._broadcast(parameter.data)
        for key, buffer in list(module.named_buffers(recurse=False)):
            buffer = buffer.to(self._device)
            self._broadcast(buffer)
            setattr(module, key, buffer)

    @contextlib.contextmanager
    def _stream(self, module: nn.Module, purpose: str) -> Iterator[None]:
        with torch.random.fork_rng():
            torch.manual_seed(stream_seed(self._seed, purpose, self._names[module]))
            yield


def _meta(module: nn.Module, recurse: bool) -> list[str]:
    """The names of a module's meta parameters and buffers."""
    named = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    return [name for name, tensor in named if tensor.is_meta]
