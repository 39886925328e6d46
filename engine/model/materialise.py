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

    ``broadcast`` sends the first data-parallel rank's values (a no-op in one process); ``dtype_of`` says how a
    parameter is stored. A module is done once, with everything below it that is not done yet.

    Where layers are split over tp ranks, a parameter is filled whole, made equal by ``broadcast_whole``, and then cut
    to this rank's part: so every split starts equal, whatever shapes an initialisation reads.

    Meta parameters are filled as the model's own constructor would: `reset_parameters` of each module, then the
    model's `_init_weights(module)` (Hugging Face's convention), inner modules first. A module around the ``blocks`` is
    initialised for its own parameters only, since the blocks may be sharded by then.

    Raises EngineError for meta parameters and buffers that neither of the two fills. ``same_everywhere``: all ranks
    gave the same parameters values, so that what is filled here needs no broadcast.
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
        same_everywhere: bool = True,
        broadcast_whole: Callable[[Tensor], None] = lambda tensor: None,
    ) -> None:
        self._model, self._registry, self._device, self._seed = model, registry, device, seed
        self._broadcast, self._dtype_of, self._same_everywhere = broadcast, dtype_of, same_everywhere
        self._broadcast_whole = broadcast_whole
        self._names = {module: name for name, module in model.named_modules()}
        inside = {module for block in blocks for module in block.modules()}
        self._around = {m for m in model.modules() if m not in inside and not inside.isdisjoint(m.modules())}
        self._done: set[nn.Module] = set()
        self._allocated: dict[nn.Module, list[str]] = {}
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
            for module in to_fill:
                self._check_filled(module)
            for module in fresh:
                self._place(module, broadcast=not self._same_everywhere or module not in to_fill)

    def _allocate(self, module: nn.Module) -> None:
        """Real storage for a module's own meta parameters and buffers; its own initialisation, if it has one."""
        meta = _meta(module, recurse=False)
        if not meta:
            return
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in self._real:
                self._real[parameter] = nn.Parameter(_unfilled(parameter, self._device), parameter.requires_grad)
                self._registry.replace(parameter, self._real[parameter])
            setattr(module, key, self._real[parameter])
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, _unfilled(buffer, self._device))
        self._allocated[module] = meta
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            with self._stream(module, "reset_parameters"):
                reset()

    def _check_filled(self, module: nn.Module) -> None:
        named = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
        missing = [name for name in self._allocated.get(module, ()) if _is_unfilled(named[name])]
        if missing:
            name = self._names[module] or "the model"
            raise EngineError(
                f"{name} ({type(module).__name__}) was built on the meta device and nothing fills "
                f"{', '.join(missing)}: give the class a reset_parameters() method that does, or the model an "
                "_init_weights(module) method, or build the model on the CPU"
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
            info = self._registry.info(parameter)
            values = parameter.data
            if broadcast:
                values = values.to(self._device).contiguous()
                self._broadcast_whole(values)
            if info is not None:
                values = info.part(values)
            # shards are cut from row-major values
            parameter.data = values.to(self._device, self._dtype_of(values.dtype)).contiguous()
            if broadcast:
                self._broadcast(parameter.data)
        for key, buffer in list(module.named_buffers(recurse=False)):
            buffer = buffer.to(self._device)
            self._broadcast_whole(buffer)
            self._broadcast(buffer)
            setattr(module, key, buffer)

    @contextlib.contextmanager
    def _stream(self, module: nn.Module, purpose: str) -> Iterator[None]:
        with torch.random.fork_rng(devices=[] if self._device.type == "cpu" else [self._device]):
            torch.manual_seed(stream_seed(self._seed, purpose, self._names[module]))
            yield


def _unfilled(like: Tensor, device: torch.device) -> Tensor:
    """Storage that shows whether something was written into it: NaN, or an integer's lowest value."""
    if like.is_floating_point() or like.is_complex():
        return torch.full_like(like, float("nan"), device=device)
    return torch.full_like(like, _lowest(like.dtype), device=device)


def _is_unfilled(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:  # a mask has no value to spare
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    lowest = tensor == _lowest(tensor.dtype)
    return bool(lowest.all() if tensor.dtype == torch.uint8 else lowest.any())  # 0 is a likely value of a uint8


def _lowest(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _meta(module: nn.Module, recurse: bool) -> list[str]:
    """The names of a module's meta parameters and buffers."""
    named = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    return [name for name, tensor in named if tensor.is_meta]
