"""What one real block of each kind is called with, taken from a small forward of a copy of the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.messages import EngineError
from engine.model.tensor_parallel.matrices import matrix_of
from engine.model.tensor_parallel.sketch import PURPOSE, SEED, Sketch, ancestors, detached
from engine.random import generator
from engine.torch_compat import tree_map_tensors

BATCH, LENGTHS = 2, (8, 4)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module. Floating tensors that came from parameters require a gradient."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Enough(BaseException):
    """Ends a forward that has shown all that was asked for; no ``except Exception`` of a model may catch it."""


def capture(sketch: Sketch, names: Sequence[str], sample: Any = None) -> dict[str, Call]:
    """Module name -> its first call, for every one of ``names``, from one forward of ``sketch.model``.

    The forward ends where the last of them is called. Token ids and then numbers are made up; where the model takes
    neither, ``sample`` is tried, a batch as the model takes it (dict, tuple or tensor). "" names the model itself.

    Raises EngineError where no inputs drive the model that far, with what each attempt ran into.
    """
    attempts: list[str] = []
    for what, args, kwargs in sample_calls(sketch.model, sample, sketch.device):
        seen: dict[str, Call] = {}
        hooks = _listen(sketch, names, seen)
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                sketch.model(*args, **kwargs)
        except _Enough:
            return seen
        except Exception as error:
            attempts.append(f"{what}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        else:
            missed = [name for name in names if name not in seen]
            if not missed:
                return seen
            attempts.append(f"{what}: {', '.join(missed[:4])} did not run")
        finally:
            for hook in hooks:
                hook.remove()
    raise EngineError(
        "tensor_parallel: a plan is proved on one block with the inputs of a small forward, and no forward of "
        f"{type(sketch.model).__name__} came as far as {names[-1] or 'its end'}; tried:\n"
        + "\n".join(f"  {attempt}" for attempt in attempts)
        + "\npass training_data= to initialize(), whose first samples are used then"
    )


def _listen(sketch: Sketch, names: Sequence[str], seen: dict[str, Call]) -> list[Any]:
    wanted = {sketch.model.get_submodule(name): name for name in names}
    around = ancestors(sketch.model, wanted)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = wanted.get(module)
        if name is not None and name not in seen:
            copied: Callable[[Any], Any] = functools.partial(tree_map_tensors, detached)
            seen[name] = Call(copied(args), copied(kwargs))
            if len(seen) == len(wanted) and name:
                raise _Enough
        sketch.fill(module, recurse=module not in around)

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for module in sketch.model.modules()
    ]


def sample_calls(
    model: nn.Module, sample: Any, device: torch.device
) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """``(what it is, args, kwargs)`` of calls worth trying, the likeliest first."""
    without_cache(model)
    stream = generator(SEED, PURPOSE, "inputs")
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    signature = inspect.signature(model.forward).parameters
    needed = [
        p.name
        for p in signature.values()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD
    ]
    for length in LENGTHS if tables else ():
        ids = torch.randint(max(tables), (BATCH, length), generator=stream).to(device)
        yield f"token ids of shape {tuple(ids.shape)}", (ids,), {}
        if "input_ids" in signature:
            yield f"input_ids of shape {tuple(ids.shape)}", (), {"input_ids": ids}
        more = [name for name in ("input_ids", "decoder_input_ids") if name in signature]
        named = {name: torch.ones_like(ids) if "mask" in name else ids for name in dict.fromkeys([*needed, *more])}
        if len(named) > 1:
            yield f"{', '.join(named)} of shape {tuple(ids.shape)}", (), named
    for first in [module for module in model.modules() if isinstance(module, nn.Conv2d)][:1]:
        side = getattr(getattr(model, "config", None), "image_size", 32)
        if isinstance(side, int):
            images = torch.randn((BATCH, first.in_channels, side, side), generator=stream).to(device)
            yield f"images of shape {tuple(images.shape)}", (images,), {}
    width = next((matrix.num_inputs for matrix in map(matrix_of, model.modules()) if matrix is not None), None)
    for shape in ((BATCH, LENGTHS[0], width), (BATCH, width)) if width is not None else ():
        yield f"numbers of shape {shape}", (torch.randn(shape, generator=stream).to(device),), {}
    if sample is not None:
        small = tree_map_tensors(lambda tensor: tensor[:BATCH].to(device) if tensor.dim() else tensor, sample)
        if isinstance(small, Mapping):
            yield "the training data", (), dict(small)
        elif isinstance(small, list | tuple):
            yield "the training data", tuple(small), {}
            yield "the first of the training data", (small[0],), {}
        else:
            yield "the training data", (small,), {}
    for name, tensor in dict(getattr(model, "dummy_inputs", None) or {}).items():
        if isinstance(tensor, Tensor):
            yield f"its own dummy_inputs ({name}, ...)", (), dict(model.dummy_inputs)  # type: ignore[arg-type]
            break


def without_cache(model: nn.Module) -> None:
    """Switch the key-value cache of a (copied) transformers model off: a block that is run twice would extend it."""
    for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        if getattr(config, "use_cache", None):
            config.use_cache = False
