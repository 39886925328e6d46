"""The parameter registry: who is who, settled once, before any transform touches the model.

Norms, optimizer groups, checkpoints, export and the rebinding of client optimizers read it; nothing else walks
`named_parameters()`. Names are the user's own and never change; a tied parameter is known by its first owner's
name, its other names are aliases.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.config.messages import EngineError
from engine.cut import Cut

log = logging.getLogger("engine")
_claimed: WeakSet[nn.Module] = WeakSet()


def check_free(model: nn.Module) -> None:
    """Raises EngineError where an engine that is not destroyed has ``model`` or a part of it: two engines would fight
    over gradients and storage."""
    for name, module in model.named_modules():
        if module in _claimed:
            what = f"its module {name}" if name else "the model"
            raise EngineError(
                f"{what} ({type(module).__name__}) already belongs to an engine: destroy() that one first (a model "
                "that was sharded by stage 3 or split by tensor parallelism stays cut and must be built anew), or give "
                "each engine a model of its own"
            )


def claim(model: nn.Module) -> None:
    """Note that ``model`` and all its modules belong to an engine now."""
    _claimed.update(model.modules())


def release(model: nn.Module, registry: ParameterRegistry) -> None:
    """Undo `claim`, unless the model's parameters are cut."""
    is_split = any(info.cut is not None for info in registry.infos)
    if not is_split and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        _claimed.difference_update(model.modules())


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the user's model. ``block`` is its repeated block's index, if any; ``group`` its index in
    `ParameterRegistry.groups`, None for a frozen parameter.

    ``shape``: what the data-parallel ranks share, this tp rank's part where ``cut`` says that layers are split; in the
    user's model it is ``global_shape``. ``num_copies``: tp ranks that hold the same, of which the first stands for all
    (``is_copy`` is true on the others) where something is counted or saved once.
    """

    index: int
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    block: int | None
    group: int | None
    cut: Cut | None = None
    num_copies: int = 1
    is_copy: bool = False

    @property
    def numel(self) -> int:
        """Elements of ``shape``."""
        return torch.Size(self.shape).numel()

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.cut is None else self.cut.global_shape

    @property
    def global_numel(self) -> int:
        return torch.Size(self.global_shape).numel()

    @property
    def stands_for_all(self) -> bool:
        """Whether of the tp ranks this one saves what they have in common of the parameter (a step count)."""
        return not self.is_copy if self.cut is None else self.cut.rank == 0

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What this tp rank holds of ``whole``, a tensor of ``global_shape``."""
        return whole if self.cut is None else self.cut.part(whole)


class ParameterRegistry:
    """All parameters of ``model`` in registration order.

    ``model_parameters`` is what users pass to `initialize`: parameters, or param-group dicts, or None for every
    trainable parameter in one group. ``groups`` keeps the options of each group without its parameters.

    Raises EngineError for a parameter in two groups and for one that the model does not hold.
    """

    def __init__(
        self, model: nn.Module, model_parameters: Iterable[Any] | None = None, blocks: Iterable[nn.Module] = ()
    ) -> None:
        first_name: dict[nn.Parameter, str] = {}
        aliases: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first_name.setdefault(parameter, name) != name:
                aliases.setdefault(parameter, []).append(name)
        block_of = {p: index for index, block in reversed(list(enumerate(blocks))) for p in block.parameters()}
        self.groups, group_of = _read_groups(first_name, model_parameters)
        self.infos: list[ParameterInfo] = []
        self._info_of: dict[nn.Parameter, ParameterInfo] = {}
        self._current: list[nn.Parameter] = []
        for index, (parameter, name) in enumerate(first_name.items()):
            info = ParameterInfo(
                index=index,
                name=name,
                aliases=tuple(aliases.get(parameter, ())),
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                trainable=parameter.requires_grad,
                block=block_of.get(parameter),
                group=group_of.get(parameter) if parameter.requires_grad else None,
            )
            self.infos.append(info)
            self._info_of[parameter] = info
            self._current.append(parameter)
        outside = [info.name for info in self.infos if info.trainable and info.group is None]
        if outside:
            log.warning(
                "%d trainable parameters (%s, ...) are in no optimizer group: the engine neither reduces, steps nor "
                "clears their gradients; freeze them with requires_grad_(False) if that is meant",
                len(outside),
                outside[0],
            )
        self.by_name = {info.name: info for info in self.infos}
        self.aliases = {alias: info.name for info in self.infos for alias in info.aliases}
        self.stage = 0
        self.stages_of: dict[int, tuple[int, ...]] = {info.index: (0,) for info in self.infos}
        """Registry index -> the pipeline ranks that hold the parameter; `stage` is this one's."""
        self.buffer_stages: dict[str, int] = {}
        """Persistent buffer or key of an extra state -> the pipeline rank that saves it; {} without a pipeline."""
        self.buffer_facts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def spread(self, stages_of: Mapping[int, Iterable[int]], stage: int) -> None:
        """The model was cut: this rank, pipeline rank ``stage``, holds only what ``stages_of`` gives it."""
        self.stages_of = {index: tuple(sorted(set(stages))) for index, stages in stages_of.items()}
        self.stage = stage

    def free(self, indices: Iterable[int]) -> None:
        """Let go of the values of parameters that are not here any more, also where somebody holds the objects."""
        for index in indices:
            parameter = self._current[index]
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def is_held(self, info: ParameterInfo) -> bool:
        return self.stage in self.stages_of[info.index]

    def is_written(self, info: ParameterInfo) -> bool:
        """Whether this is the pipeline rank that saves it: the first that holds it."""
        return self.stages_of[info.index][0] == self.stage

    def held(self) -> list[ParameterInfo]:
        """The parameters on this rank; the others are known and lie on other pipeline ranks."""
        return [info for info in self.infos if self.is_held(info)]

    def absent(self) -> list[int]:
        """The indices of the others."""
        return [info.index for info in self.infos if not self.is_held(info)]

    def shared(self) -> dict[int, tuple[int, ...]]:
        """Registry index -> pipeline ranks, of the parameters of this rank that others hold as well."""
        return {info.index: self.stages_of[info.index] for info in self.held() if len(self.stages_of[info.index]) > 1}

    def objects_in(self, model: nn.Module) -> dict[int, nn.Parameter]:
        """Registry index -> the parameter object that ``model`` has for it, under whichever of its names."""
        found: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            info = self.by_name.get(self.aliases.get(name, name))
            if info is not None:
                found.setdefault(info.index, parameter)
        return found

    def __len__(self) -> int:
        return len(self.infos)

    def info(self, parameter: nn.Parameter) -> ParameterInfo | None:
        """The record of a parameter object, also of one that a transform has replaced since; None for a stranger."""
        return self._info_of.get(parameter)

    def parameters(self) -> list[tuple[ParameterInfo, nn.Parameter]]:
        """Records with the parameter objects the model holds now, of what is on this rank."""
        return [(info, p) for info, p in zip(self.infos, self._current, strict=True) if self.is_held(info)]

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Follow a parameter that a transform has replaced. The old object is still known to `info`."""
        info = self._info_of[old]
        self._info_of[new] = info
        self._current[info.index] = new

    def split(self, cuts: Mapping[str, Cut], size: int, rank: int) -> None:
        """Note how layers are split over the ``size`` tp ranks, of which this is ``rank``: ``cuts`` by name, every
        other parameter is whole on each of them."""
        for index, info in enumerate(self.infos):
            cut = cuts.get(info.name)
            if cut is not None:
                self.infos[index] = replace(info, shape=cut.shape, cut=cut)
            else:
                self.infos[index] = replace(info, num_copies=size, is_copy=rank > 0)
        self.by_name = {info.name: info for info in self.infos}
        self._info_of = {parameter: self.infos[info.index] for parameter, info in self._info_of.items()}

    def share(self, names: Collection[str], size: int, rank: int) -> None:
        """Note that the parameters of these names are whole on each of ``size`` ranks, of which this is ``rank``, in a
        model that its caller has split; every other is a part of its own."""
        for index, info in enumerate(self.infos):
            if info.name in names:
                self.infos[index] = replace(info, num_copies=size, is_copy=rank > 0)
        self.by_name = {info.name: info for info in self.infos}
        self._info_of = {parameter: self.infos[info.index] for parameter, info in self._info_of.items()}

    def refresh(self, model: nn.Module) -> None:
        """Follow all that a transform of the whole ``model`` has replaced; names have stayed."""
        objects = self.objects_in(model)
        for info, old in self.parameters():
            if objects[info.index] is not old:
                self.replace(old, objects[info.index])

    def unfrozen(self) -> list[str]:
        """The names of parameters that were frozen when this was made and are not any more."""
        return [info.name for info, p in self.parameters() if not info.trainable and p.requires_grad]

    def strangers(self, model: nn.Module) -> list[str]:
        """The trainable parameters of ``model`` that came after this was made."""
        named = model.named_parameters(remove_duplicate=False)
        return [n for n, p in named if p.requires_grad and n not in self.by_name and n not in self.aliases]


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of ``model.state_dict()``, one that several modules share under each of its names."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}


EXTRA_STATE = "_extra_state"
"""What torch ends the key of a module's `get_extra_state` in a state dict with."""


def extra_state_keys(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep a state of another kind (`torch.nn.Module.get_extra_state`), by its state-dict key."""
    return {
        f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _read_groups(
    names: Mapping[nn.Parameter, str], model_parameters: Iterable[Any] | None
) -> tuple[list[dict[str, Any]], dict[nn.Parameter, int]]:
    if model_parameters is None:
        return [{}], dict.fromkeys(names, 0)
    entries = list(model_parameters)
    if not any(isinstance(entry, dict) for entry in entries):
        entries = [{"params": entries}]
    groups: list[dict[str, Any]] = []
    group_of: dict[nn.Parameter, int] = {}
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict) or "params" not in entry:
            raise EngineError(
                f"model_parameters[{position}] is {type(entry).__name__}; give parameters, "
                "or param-group dicts with 'params', not a mix"
            )
        members = entry["params"]
        members = [members] if isinstance(members, nn.Parameter) else list(members)
        members = [p[1] if isinstance(p, tuple) else p for p in members]
        if not members:
            continue  # an empty group is dropped, as DeepSpeed does
        for parameter in members:
            if parameter not in names:
                raise EngineError(
                    f"model_parameters[{position}] holds a parameter of shape {tuple(parameter.shape)} that "
                    "the model does not; pass parameters of the model given to initialize()"
                )
            if parameter in group_of:
                raise EngineError(
                    f"parameter {names[parameter]} is in model_parameters groups {group_of[parameter]} and "
                    f"{len(groups)}; keep one"
                )
            group_of[parameter] = len(groups)
        groups.append({key: value for key, value in entry.items() if key != "params"})
    return groups, group_of
