"""What a model is cut into: a list of layers called one after the other, and what is around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from engine.config.messages import EngineError
from engine.model.facts import read_facts
from engine.model.pipeline.children import Run, called_children, trunk_of
from engine.plan import ModelFacts
from engine.torch_compat import children_of

Place = Literal["first", "last", "both"]


@dataclass(frozen=True)
class Layers:
    """``container`` (a `Sequential`, `ModuleList`, ...) holds the layers under ``keys``, in the order of the calls;
    ``path`` is its name in the model, '' for the model itself. ``order``: module name -> place of registration.
    ``differ``: what the layers return may differ in shape (children.py)."""

    container: nn.Module
    keys: tuple[str, ...]
    path: str
    order: Mapping[str, int]
    differ: bool = False

    @property
    def modules(self) -> list[nn.Module]:
        return [children_of(self.container)[key] for key in self.keys]  # type: ignore[misc]

    def name(self, position: int) -> str:
        return f"{self.path}.{self.keys[position]}" if self.path else self.keys[position]

    def position_of(self, name: str) -> int | None:
        """The layer that the parameter or buffer ``name`` belongs to; None for what is around the layers."""
        inside = name.removeprefix(f"{self.path}.") if self.path else name
        if self.path and inside == name:
            return None
        key = inside.partition(".")[0]
        return self.keys.index(key) if key in self.keys and "." in inside else None


def find_layers(model: nn.Module, blocks: Sequence[nn.Module], path: str | None, run: Run | None = None) -> Layers:
    """The layers of ``model``: those of a sequence (`nn.Sequential`, `engine.PipelineModule`) unless ``path`` (config
    ``model.blocks``) names others; else the container of its repeated ``blocks``; else the children of the module that
    holds all parameters, in the order in which ``run(model)`` calls them.

    Raises EngineError for a model that has none of these.
    """
    is_sequence = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    if path is None and (is_sequence or getattr(model, "is_layer_sequence", False)):
        return Layers(model, tuple(key for key, layer in children_of(model).items() if layer is not None), "", order)
    wanted = set(blocks)
    for name, module in model.named_modules():
        keys = tuple(key for key, child in children_of(module).items() if child in wanted)
        if wanted and set(module.children()) >= wanted and len(keys) >= len(wanted):
            return Layers(module, keys, name, order)
    trunk = trunk_of(model)
    keys = () if wanted else called_children(model, trunk, run)
    if len(keys) > 1:
        return Layers(model.get_submodule(trunk), keys, trunk, order, differ=True)
    raise EngineError(
        f"pipeline.stages: {type(model).__name__} has no list of repeated blocks to cut between; name its container "
        "with model.blocks, or give the model as nn.Sequential or engine.PipelineModule"
    )


def place_of(model: nn.Module, layers: Layers, name: str) -> Place:
    """Which stages need the parameter or buffer ``name``, which is around the layers.

    What is registered behind the layers is used behind them; embeddings before them. Of anything else (a parameter of
    the model itself, a norm that was registered early) the order of registration does not tell: it stays on both the
    first and the last stage, and their gradients are added.
    """
    owner, _, _ = name.rpartition(".")
    if layers.path == owner or not owner or layers.path.startswith(f"{owner}."):
        return "both"
    if layers.order[owner] > layers.order[layers.path]:
        return "last"
    is_embedding = isinstance(model.get_submodule(owner), nn.Embedding)
    return "first" if is_embedding or "embed" in owner.lower() else "both"


def layered_facts(model: nn.Module, layers: Layers) -> ModelFacts:
    """The record of a model that is cut into pipeline stages: its blocks are the layers."""
    facts = read_facts(model, layers.modules)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if layers.position_of(name) is None]
    return replace(
        facts,
        blocks=tuple(layers.name(position) for position in range(len(layers.keys))),
        layer_kinds=tuple(kind_of(layer) for layer in layers.modules),
        ends=tuple((name, place_of(model, layers, name)) for name in names),
    )


def kind_of(layer: nn.Module) -> str:
    """The class that ``type:REGEX`` looks at."""
    return str(getattr(layer, "layer_kind", type(layer).__name__))
