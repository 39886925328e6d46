"""A copy of a model that holds no values until a module runs: what a plan is tried on, so that the user's own model,
its random state and its counters are never touched, and a model on the meta device can be tried as well.

Parameters get random values from streams keyed by their names: equal on all ranks, and never zero, since a bias or an
output projection that starts at zero would hide a wrong cut. Buffers are copied; those on meta are filled as the model
itself would, else with plain values.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from engine.config.messages import EngineError
from engine.random import generator

SEED, PURPOSE = 0, "tensor-parallel proof"


class Sketch:
    """``model`` is the copy: on meta, in eval mode, every parameter trainable, floating parameters in fp32.

    Raises EngineError for a model that cannot be copied.
    """

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        self.device = device
        memo: dict[int, object] = {}
        for parameter in original.parameters():
            floating = parameter.is_floating_point()
            hollow = torch.empty_like(parameter, device="meta", dtype=torch.float32 if floating else None)
            memo[id(parameter)] = nn.Parameter(hollow, requires_grad=floating)
        try:
            self.model: nn.Module = copy.deepcopy(original, memo)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise EngineError(
                "tensor_parallel: a plan is proved on a copy of one block, and this model "
                f"({type(original).__name__}) cannot be copied: {type(error).__name__}: {error}; give the attribute "
                "that stops copy.deepcopy() a __deepcopy__ method, or make it when it is first used"
            ) from error
        self.model.eval()
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self._initialise: dict[nn.Module, Callable[[nn.Module], None]] = {}
        for owner in self.model.modules():
            if callable(own := getattr(owner, "_init_weights", None)):
                self._initialise |= dict.fromkeys(owner.modules(), own)
        self._real: dict[nn.Parameter, nn.Parameter] = {}

    def fill(self, module: nn.Module, recurse: bool = True) -> None:
        """Give a module of the copy, and those below it unless ``recurse`` is False, real values on ``device``."""
        for part in module.modules() if recurse else (module,):
            self._fill_buffers(part)
            for key, parameter in part.named_parameters(recurse=False):
                if parameter.is_meta:
                    if parameter not in self._real:
                        self._real[parameter] = self._values(parameter)
                    setattr(part, key, self._real[parameter])

    def hollow(self, module: nn.Module) -> None:
        """Take the values of a module and of those below it away again."""
        back = {real: hollow for hollow, real in self._real.items()}
        for part in module.modules():
            for key, parameter in part.named_parameters(recurse=False):
                if parameter in back:
                    setattr(part, key, back[parameter])
                    self._real.pop(back[parameter], None)

    def _values(self, hollow: nn.Parameter) -> nn.Parameter:
        """Matrices keep the size of what they multiply; vectors are about 0.5, as biases and scales alike can be."""
        stream = generator(SEED, PURPOSE, self.names[hollow])
        if not hollow.is_floating_point():
            return nn.Parameter(torch.zeros_like(hollow, device=self.device), requires_grad=False)
        values = torch.randn(hollow.shape, generator=stream, dtype=torch.float32)
        values = values / math.sqrt(hollow.shape[-1]) if hollow.dim() > 1 else 0.5 + 0.25 * values
        return nn.Parameter(values.to(self.device))

    def _fill_buffers(self, module: nn.Module) -> None:
        buffers = list(module.named_buffers(recurse=False))
        hollow = [key for key, buffer in buffers if buffer.is_meta]
        for key, buffer in buffers:
            setattr(module, key, buffer.to(self.device) if not buffer.is_meta else _plain(buffer, self.device))
        initialise = self._initialise.get(module)
        if hollow and initialise is not None:
            # transformers' models fill buffers such as rotary frequencies here; a failure leaves the plain values
            with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
                initialise(module)


def _plain(like: Tensor, device: torch.device) -> Tensor:
    """Values that are legal for most uses: positive numbers, the first index, true."""
    if like.is_floating_point() or like.is_complex():
        return torch.linspace(0.5, 1.5, like.numel(), device=device).view(like.shape).to(like.dtype)
    return torch.full(like.shape, like.dtype == torch.bool, dtype=like.dtype, device=device)


def detached(tensor: Tensor) -> Tensor:
    """A leaf with the same values; it requires a gradient where ``tensor`` did."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def ancestors(model: nn.Module, modules: Collection[nn.Module]) -> set[nn.Module]:
    """The modules of ``model`` that hold one of ``modules`` below them."""
    wanted = set(modules)
    return {m for m in model.modules() if m not in wanted and not wanted.isdisjoint(m.modules())}
