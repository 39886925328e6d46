"""A model as a list of layers: DeepSpeed's `PipelineModule`, `LayerSpec` and `TiedLayerSpec`.

Names and arguments are DeepSpeed's (https://www.deepspeed.ai/tutorials/pipeline/). It is an ordinary module: without a
pipeline it trains like any other, and every layer is known by its number, so a checkpoint does not know the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from engine.config import examine
from engine.contracts import EngineError
from engine.torch_compat import children_of


class LayerSpec:
    """A layer that is built when the `PipelineModule` is: ``typename(*module_args, **module_kwargs)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise EngineError(f"LayerSpec takes a class of torch.nn.Module; it got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.typename.__name__})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all others of the same ``key``.

    ``forward_fn(module, inputs)`` is called in place of the module's forward. The whole module is one, wherever its
    layers stand; DeepSpeed shares the attributes in ``tied_weight_attr`` only, which must exist here too.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class TiedLayer(nn.Module):
    """One use of a tied module, which is its child under the name of the key."""

    def __init__(self, spec: TiedLayerSpec, module: nn.Module) -> None:
        super().__init__()
        self.add_module(spec.key, module)
        self.layer_kind, self._key, self._forward_fn = type(module).__name__, spec.key, spec.forward_fn

    def forward(self, inputs: Any) -> Any:
        module = self.get_submodule(self._key)
        return module(inputs) if self._forward_fn is None else self._forward_fn(module, inputs)


class Function(nn.Module):
    """A layer that is a plain function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer_kind = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def forward(self, inputs: Any) -> Any:
        return self._function(inputs)


class PipelineModule(nn.Module):
    """``layers`` called one after the other; each gets the output of the one before, a tensor or a tuple, as its one
    argument. Items are modules, `LayerSpec`, `TiedLayerSpec` or functions.

    ``num_stages`` (or a ``topology`` with a dimension "pipe") and ``partition_method`` ("parameters", "uniform",
    "type:REGEX", or a list) count where the config's section `pipeline` does not say otherwise. ``loss_fn(outputs,
    targets)`` is used where `initialize` gets none; batches are then ``(inputs, targets)``. ``seed_layers``: layer
    ``l`` is built after ``seed_fn(base_seed + l)`` (default: torch.manual_seed).

    All layers are built here; under ``torch.device("meta")`` they take no memory, and each rank fills its own.

    Raises EngineError for an empty list, a nested `PipelineModule`, tied layers of two classes, and a tied attribute
    that does not exist.
    """

    is_layer_sequence = True

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = True,
    ) -> None:
        super().__init__()
        specs = list(layers)
        if not specs:
            raise EngineError("PipelineModule needs at least one layer")
        if topology is not None and num_stages is None:
            num_stages = topology.get_dim("pipe")
        if activation_checkpoint_interval or activation_checkpoint_func is not None:
            raise EngineError(
                "PipelineModule(activation_checkpoint_interval=...) is not built here yet: call "
                "torch.utils.checkpoint.checkpoint inside a layer instead"
            )
        self.num_stages, self.loss_fn = num_stages, loss_fn
        self.partition_method = partition_method.lower() if isinstance(partition_method, str) else partition_method
        tied: dict[str, tuple[TiedLayerSpec, nn.Module]] = {}
        for index, spec in enumerate(specs):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + index)
            self.add_module(str(index), _build(index, spec, tied))

    @property
    def layers(self) -> list[nn.Module]:
        """The layers in order (on a pipeline rank those of other stages are stand-ins)."""
        return [layer for layer in children_of(self).values() if layer is not None]

    def __len__(self) -> int:
        return len(self.layers)

    def forward(self, *inputs: Any) -> Any:
        value = inputs[0] if len(inputs) == 1 else inputs
        for layer in self.layers:
            value = layer(value)
        return value


def overrides_of(model: Any, source: Any, auto: Any) -> dict[str, Any]:
    """What a `PipelineModule` adds to its config: stages and partition, where the config leaves them open.

    Raises EngineError where both name stages, and not the same number.
    """
    if not isinstance(model, PipelineModule) or model.num_stages is None:
        return {}
    config = examine(source, auto=auto).config
    if config is None:
        return {}
    section = config.pipeline
    stages = section.stages if section is not None else "auto"
    if stages not in ("auto", model.num_stages):
        raise EngineError(
            f"PipelineModule(num_stages={model.num_stages}), and the config says pipeline.stages {stages}: leave one "
            "of them out"
        )
    overrides: dict[str, Any] = {"pipeline.stages": model.num_stages}
    if section is None or config.origin("pipeline.partition") == "default":
        method = model.partition_method
        overrides["pipeline.partition"] = method if isinstance(method, str) else list(method)
    return overrides


def _build(index: int, spec: Any, tied: dict[str, tuple[TiedLayerSpec, nn.Module]]) -> nn.Module:
    if isinstance(spec, PipelineModule):
        raise EngineError(f"layers[{index}] is a PipelineModule; put its layers into the outer list")
    if isinstance(spec, TiedLayerSpec):
        if spec.key not in tied:
            tied[spec.key] = spec, spec.build()
        first, module = tied[spec.key]
        if spec.typename is not first.typename:
            raise EngineError(
                f"layers[{index}] ties {spec.key!r} to a {spec.typename.__name__}, and the first of that key is a "
                f"{first.typename.__name__}; tied layers are one module"
            )
        for attribute in spec.tied_weight_attr:
            try:
                module.get_parameter(attribute)
            except AttributeError:
                there = ", ".join(name for name, _ in module.named_parameters()) or "none"
                raise EngineError(
                    f"layers[{index}]: tied_weight_attr {attribute!r} is no parameter of {spec.typename.__name__}; "
                    f"it has: {there}"
                ) from None
        return TiedLayer(spec, module)
    if isinstance(spec, LayerSpec):
        return spec.build()
    if isinstance(spec, nn.Module):
        return spec
    if callable(spec):
        return Function(spec)
    raise EngineError(f"layers[{index}] is {spec!r}; give a module, a LayerSpec, a TiedLayerSpec or a function")
