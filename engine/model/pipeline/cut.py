"""Leave on this rank what its pipeline stages need, in place: the model stays the user's, with its own names.

The user's forward runs on every stage. Layers of other stages are replaced by *gates*: those in front hand in what came
from the stage before, the one behind ends the forward. So whatever a model does around its layers (masks, positions,
the loss) happens where it is needed, from the batch, which every stage has; only the output of a stage's last layer
travels. Parameters of other stages are gone; in front of a later stage's layers stands NaN in their place, so that a
model that uses more than the hidden state (a skip over layers) shows it at once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.contracts import EngineError, PipelineError
from engine.data.batch import call_with_batch
from engine.mesh import Mesh
from engine.model.pipeline.children import absent_output, meta_copy, unusable
from engine.model.pipeline.layers import Layers, find_layers, layered_facts, place_of
from engine.model.pipeline.profile import times_of_layers
from engine.model.zero.layout import compute_dtype
from engine.parameters import ParameterRegistry, extra_state_keys, persistent_buffers
from engine.plan import Plan
from engine.plan.partition import Bounds
from engine.plan.pipeline_schedules import rank_of_stage, stages_of_rank
from engine.plan.stages import stages_of
from engine.torch_compat import children_of, tree_leaves, tree_map_tensors


class _Reached(BaseException):
    """The forward has come to a layer of the next stage. No Exception: a model may catch those."""


class Gate(nn.Module):
    """Stands for a layer of another stage; plain attributes of the layer (its kind of attention, say) are kept."""

    def __init__(self, position: int, layer: nn.Module, pass_by: Callable[[int, Any, Any], Any]) -> None:
        super().__init__()
        inherited = vars(nn.Module()).keys()
        facts = {k: v for k, v in vars(layer).items() if k not in inherited and not isinstance(v, Tensor)}
        self.__dict__["_facts"] = facts
        self.__dict__["_position"], self.__dict__["_pass_by"] = position, pass_by

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_pass_by"](self.__dict__["_position"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("_facts", {})
        return facts[name] if name in facts else super().__getattr__(name)


class StagedModel:
    """The stages of one rank. Call `run` for one micro-batch of one stage.

    ``stages``: their numbers among ``len(bounds) - 1``, ascending. ``seed(layer)`` is called before each layer in
    training, and with None before what is in front of the layers.
    """

    def __init__(self, model: nn.Module, layers: Layers, bounds: Bounds, stages: Sequence[int]) -> None:
        self.model, self.bounds, self.stages = model, bounds, list(stages)
        self.num_stages = len(bounds) - 1
        self._children, self._keys = children_of(layers.container), layers.keys
        self.names = [layers.name(position) for position in range(len(layers.keys))]
        self._layers = dict(enumerate(layers.modules))
        self._shapes = {at: meta_copy(layer) for at, layer in self._layers.items()} if layers.differ else {}
        self._gates = [Gate(position, layer, self._pass_by) for position, layer in self._layers.items()]
        self._layers = {position: layer for position, layer in self._layers.items() if self._is_here(position)}
        self._stage: int | None = None
        self._received: Any = None
        self._output: Any = None
        self._has_output = False
        self._seed: Callable[[int | None], None] | None = None
        self._forward = model.forward

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._guarded_forward(*args, **kwargs)

        model.forward = forward
        for position, gate in enumerate(self._gates):
            if position not in self._layers:
                self._children[self._keys[position]] = gate

    def _is_here(self, position: int) -> bool:
        return any(self.bounds[stage] <= position < self.bounds[stage + 1] for stage in self.stages)

    def layers_of(self, stage: int) -> list[nn.Module]:
        return [self._layers[position] for position in range(self.bounds[stage], self.bounds[stage + 1])]

    @property
    def runs(self) -> list[list[nn.Module]]:
        """The layers with parameters, stage by stage."""
        return [[m for m in self.layers_of(stage) if any(True for _ in m.parameters())] for stage in self.stages]

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """The trainable parameters that a backward of ``stage`` may reach."""
        own = [p for layer in self.layers_of(stage) for p in layer.parameters()]
        if stage in (0, self.num_stages - 1):
            inside = {p for layer in self._layers.values() for p in layer.parameters()}
            own += [p for p in self.model.parameters() if p not in inside]
        return [p for p in dict.fromkeys(own) if p.requires_grad]

    def watch_layers(self) -> None:
        """From now on see what each layer returns. After all transforms: FSDP2's hooks change it once more."""
        positions: dict[nn.Module, int] = {}
        for position, layer in self._layers.items():
            positions.setdefault(layer, position)
        for layer, position in positions.items():
            layer.register_forward_pre_hook(functools.partial(self._before, position))
            layer.register_forward_hook(self._after)

    def _before(self, position: int, layer: nn.Module, args: Any) -> None:
        if self._seed is not None:
            self._seed(position)

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._stage is not None:
            self._output, self._has_output = output, True

    def run(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        received: Any = None,
        seed: Callable[[int | None], None] | None = None,
    ) -> Any:
        """What the last layer of ``stage`` returns for a micro-batch; of the last stage, what the model returns.

        ``received``: what the stage before returned. Raises EngineError where the forward does not come by the layers.
        """
        self._stage, self._received, self._seed = stage, received, seed
        self._output, self._has_output = None, False
        try:
            if seed is not None:
                seed(None)
            return self.model(*args, **kwargs)
        finally:
            self._stage = self._received = self._seed = self._output = None

    @contextlib.contextmanager
    def computing_again(self, seed: Callable[[int | None], None] | None) -> Iterator[None]:
        """Around a backward, which may compute layers again for their activations: they draw what they drew."""
        self._seed = seed
        try:
            yield
        finally:
            self._seed = None

    def _show(self, stage: int | None) -> None:
        """Put the layers of ``stage`` in their places, gates for all others; None: every layer of this rank.

        Inside the forward only: what looks through the model's modules around it (FSDP2, when it begins) sees all.
        """
        for position, layer in self._layers.items():
            is_shown = stage is None or self.bounds[stage] <= position < self.bounds[stage + 1]
            self._children[self._keys[position]] = layer if is_shown else self._gates[position]

    def _guarded_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._stage is None:
            raise PipelineError(
                f"this model is cut over {self.num_stages} pipeline stages and has no forward of its own: call "
                "train_batch() or eval_batch()"
            )
        stage = self._stage
        self._show(stage)
        try:
            output = self._forward(*args, **kwargs)
        except _Reached:
            if not self._has_output:
                raise EngineError(f"{self._where(stage)}: the forward passed by its layers without a call") from None
            return self._output
        finally:
            self._show(None)
        if stage < self.num_stages - 1:
            behind = self.names[self.bounds[stage + 1]]
            raise EngineError(
                f"{self._where(stage)}: the forward ended without coming to {behind}, so the model does not call its "
                "layers one after the other, and it cannot be cut there"
            )
        return output

    def _where(self, stage: int) -> str:
        first, last = self.names[self.bounds[stage]], self.names[self.bounds[stage + 1] - 1]
        return f"pipeline stage {stage} ({first} to {last})"

    def _pass_by(self, position: int, args: Any, kwargs: Any) -> Any:
        """A gate is called. In front of the stage: what came in, or for layers further in front NaN, of the same shape
        where all layers return one."""
        assert self._stage is not None
        first = self.bounds[self._stage]
        if position >= first:
            raise _Reached
        if position == first - 1:
            return self._received
        if position in self._shapes:
            return absent_output(self._shapes[position], self.names[position], args, kwargs, self._received)
        return tree_map_tensors(_unusable, self._received)

    def check_independent(self, stage: int, received: Any, output: Any) -> None:
        """Raises EngineError where finite hidden states became NaN, as they do where a stage reads what is not there.

        Looks at values, so it is for the first micro-batch of a kind.
        """
        if all(map(_is_finite, _floats(received))) and any(value.isnan().any() for value in _floats(output)):
            raise EngineError(
                f"{self._where(stage)} turned finite hidden states into NaN: either its parameters are not finite, or "
                "it reads more than the output of the layer before, such as a sum over earlier layers or a module "
                "around the layers that another stage has. Such a model can be cut only where one tensor (or tuple) "
                "carries all: give it as engine.PipelineModule, or name other layers with model.blocks"
            )


def apply(
    model: nn.Module,
    registry: ParameterRegistry,
    blocks: Sequence[nn.Module],
    plan: Plan,
    mesh: Mesh,
    sample: Callable[[], Any] = lambda: None,
    loss_fn: Callable[..., Any] | None = None,
) -> StagedModel:
    """Cut ``model`` and tell ``registry`` which rank holds what.

    ``sample()`` is a batch, None where there is none: the partition "time" runs it through the model before the cut,
    and all ranks agree on the times. Otherwise there is no communication.

    Raises EngineError where the partition does not fit the layers, and where times cannot be measured.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    run = functools.partial(_run_without_memory, sample=sample, has_loss_fn=loss_fn is not None)
    layers = find_layers(model, blocks, plan.block_path, run)
    if layers.differ and plan.degrees.tp > 1:
        raise EngineError(
            f"tensor_parallel does not go with pipeline.stages {plan.degrees.pp} for {type(model).__name__}, which has "
            "no list of repeated blocks: layers of different shapes are not split here; set tensor_parallel.size to 1"
        )
    shapes = {info.name: info.global_shape for info in registry.infos}
    facts = layered_facts(model, layers)
    facts = replace(facts, parameters=tuple(replace(p, shape=shapes[p.name]) for p in facts.parameters))
    if pipeline.partition == "time":
        facts = replace(facts, layer_times=times_of_layers(model, layers, plan, mesh, sample(), loss_fn))
    bounds = stages_of(plan, facts).bounds
    num_ranks, num_stages = plan.degrees.pp, len(bounds) - 1
    stage_of = {p: s for s, (a, b) in enumerate(itertools.pairwise(bounds)) for p in range(a, b)}
    rank_of = {stage: rank_of_stage(pipeline.schedule, num_ranks, stage) for stage in range(num_stages)}

    def ranks_of(name: str) -> set[int]:
        position = layers.position_of(name)
        if position is not None:
            return {rank_of[stage_of[position]]}
        place = place_of(model, layers, name)
        return {rank_of[stage] for stage in {"first": (0,), "last": (num_stages - 1,)}.get(place, (0, num_stages - 1))}

    registry.spread(
        {info.index: set().union(*map(ranks_of, (info.name, *info.aliases))) for info in registry.infos},
        mesh.coordinates["pp"],
    )
    # Of buffers on both ends the last stage has the true ones: only its forward runs through.
    last = rank_of[num_stages - 1]
    buffers = persistent_buffers(model)
    written = (*buffers, *extra_state_keys(model))
    registry.buffer_stages = {n: last if last in ranks_of(n) else min(ranks_of(n)) for n in written}
    registry.buffer_facts = {name: (tuple(b.shape), b.dtype) for name, b in buffers.items()}
    _refuse_statistics(model, layers)
    whole = set(model.state_dict())
    here = stages_of_rank(pipeline.schedule, num_ranks, pipeline.virtual_stages, registry.stage)
    staged = StagedModel(model, layers, bounds, here)
    _drop(model, registry, plan, mesh.device)
    model.register_load_state_dict_pre_hook(functools.partial(_leave_out, whole - set(model.state_dict())))
    return staged


def _run_without_memory(model: nn.Module, sample: Callable[[], Any], has_loss_fn: bool) -> None:
    batch = sample()
    inputs = batch[0] if has_loss_fn else batch
    call_with_batch(meta_copy(model), tree_map_tensors(lambda tensor: tensor.to("meta"), inputs))


@torch.no_grad()
def _drop(model: nn.Module, registry: ParameterRegistry, plan: Plan, device: torch.device) -> None:
    """Free the parameters of other ranks; where a module around the layers had one, NaN of its shape that takes no
    memory."""
    absent = set(registry.absent())
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            info = registry.info(parameter)
            if info is None or info.index not in absent:
                continue
            delattr(module, key)
            if info.cut is not None:  # what is not here needs no tp peers either: the class's own forward
                module.__dict__.pop("forward", None)
            dtype = compute_dtype(info.dtype, plan.precision)
            module.__dict__[key] = unusable(info.global_shape, dtype, device)
    registry.free(absent)


def _leave_out(elsewhere: set[str], module: nn.Module, state_dict: dict[str, Any], *rest: Any) -> None:
    """A state dict of the whole model loads into a stage: what other ranks hold is no surprise."""
    for name in elsewhere & state_dict.keys():
        del state_dict[name]


def _refuse_statistics(model: nn.Module, layers: Layers) -> None:
    """Running statistics of a module of which it is not known where it is used would be saved from the wrong stage."""
    for name in persistent_buffers(model):
        if layers.position_of(name) is None and place_of(model, layers, name) == "both":
            owner = model.get_submodule(name.rpartition(".")[0])
            if hasattr(owner, "running_mean"):
                raise EngineError(
                    f"pipeline: {name} is updated in forward, and the model does not say whether in front of its "
                    "layers or behind them; give the model as nn.Sequential or engine.PipelineModule"
                )


def _unusable(tensor: Tensor) -> Tensor:
    return unusable(tensor.shape, tensor.dtype, tensor.device) if tensor.is_floating_point() else tensor


def _floats(tree: Any) -> Iterator[Tensor]:
    return (leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
