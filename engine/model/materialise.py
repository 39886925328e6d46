"""Make a model real: give meta parameters values, and give every rank the same ones.

Values come from random streams keyed by (seed, module name), so every split of a model starts equal and no rank
needs more of it at once than the modules it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.config.messages import EngineError
from engine.parameters import ParameterRegistry
from engine.random import stream_seed


class Materialiser:
    """Call it with modules; afterwards their parameters and buffers are on ``device`` and equal on all ranks.

    ``broadcast`` sends rank 0's values (a no-op in one process); ``dtype_of`` says how a parameter is stored.
    A module is done once, with everything below it that is not done yet.

    Raises EngineError for meta parameters of a module that has no way to fill them: neither its own `reset_parameters`,
    nor an `_init_weights(module)` of the model (Hugging Face's convention).
    """

    def __init__(
        self,
        model: nn.Module,
        registry: ParameterRegistry,
        device: torch.device,
        seed: int,
        broadcast: Callable[[Tensor], None],
        dtype_of: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self._model, self._registry, self._device, self._seed = model, registry, device, seed
        self._broadcast, self._dtype_of = broadcast, dtype_of
        self._names = {module: name for name, module in model.named_modules()}
        self._done: set[nn.Module] = set()
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def __call__(self, modules: Sequence[nn.Module]) -> None:
        for root in modules:
            for module in root.modules():
                if module not in self._done:
                    self._done.add(module)
                    self._place(module)

    def _place(self, module: nn.Module) -> None:
        meta = [*_meta(module.named_parameters(recurse=False)), *_meta(module.named_buffers(recurse=False))]
        if meta:
            self._fill(module, meta)
        for parameter in module.parameters(recurse=False):
            if not self._first_visit(parameter):
                continue
            dtype = self._dtype_of(parameter.dtype)
            if parameter.device != self._device or parameter.dtype != dtype:
                parameter.data = parameter.data.to(self._device, dtype)
            if not meta:
                self._broadcast(parameter.data)
        for key, buffer in list(module.named_buffers(recurse=False)):
            buffer = buffer.to(self._device)
            self._broadcast(buffer)
            setattr(module, key, buffer)

    def _first_visit(self, parameter: nn.Parameter) -> bool:
        if parameter in self._replaced:
            return False
        self._replaced[parameter] = parameter
        return True

    def _fill(self, module: nn.Module, meta: Iterable[str]) -> None:
        name = self._names[module]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in self._replaced:
                real = nn.Parameter(torch.empty_like(parameter, device=self._device), parameter.requires_grad)
                self._replaced[parameter] = real
                self._registry.replace(parameter, real)
            setattr(module, key, self._replaced[parameter])
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, torch.empty_like(buffer, device=self._device))
        filled = False
        with torch.random.fork_rng():
            torch.manual_seed(stream_seed(self._seed, "init", name))
            if callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()  # type: ignore[operator]
                filled = True
            if callable(getattr(self._model, "_init_weights", None)):
                self._model._init_weights(module)  # type: ignore[operator]
                filled = True
        if not filled:
            raise EngineError(
                f"module {name or type(module).__name__} ({type(module).__name__}) was built on the meta device and "
                f"nothing can fill {', '.join(meta)}: give the class a reset_parameters() method, or the model an "
                "_init_weights(module) method, or build the model on the CPU"
            )


def _meta(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, tensor in named if tensor.is_meta]
