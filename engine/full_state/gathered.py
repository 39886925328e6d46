"""Parameters whole inside a context, and edits taken over at its end: DeepSpeed's ``zero.GatheredParameters``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError, PipelineError
from engine.full_state.local import LocalState
from engine.full_state.owners import locate
from engine.parameters import ParameterInfo


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor] | Tensor, modifier_rank: int | None = None) -> Iterator[list[Tensor]]:
    """Inside, the modules hold whole parameters; the list given has them in the order of ``parameters``.

    With ``modifier_rank`` what that rank has changed is on all ranks afterwards: in masters, in what forward reads
    and in what is saved. Without it changes are not kept at stage 3. All ranks enter and leave. A stage 3 parameter
    that was taken from the model *before* the context stays a shard: take it from its module again, or from the list.
    Parameters that belong to no engine are left as they are.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    places = [locate(parameter) for parameter in given]
    names: dict[LocalState, list[str]] = {}
    for place in places:
        if place is not None:
            names.setdefault(place[0], []).append(place[1])
    with contextlib.ExitStack() as stack:
        opened = {owner: stack.enter_context(_opened(owner, theirs, modifier_rank)) for owner, theirs in names.items()}
        yield [p if place is None else opened[place[0]][place[1]] for p, place in zip(given, places, strict=True)]


@contextlib.contextmanager
def _opened(owner: LocalState, names: list[str], modifier_rank: int | None) -> Iterator[dict[str, Tensor]]:
    if modifier_rank is not None and not 0 <= modifier_rank < owner.mesh.world_size:
        raise EngineError(f"modifier_rank={modifier_rank} is not a rank: there are {owner.mesh.world_size}")
    registry = owner.parameter_registry
    if registry.absent():
        raise PipelineError(
            "zero.GatheredParameters: a model that is cut over pipeline stages has no whole parameters on a rank; "
            "full_parameters() and set_full_parameters() read and write them by name"
        )
    owner._bring_together()
    infos = [registry.by_name[name] for name in dict.fromkeys(names)]
    cut = [info for info, parameter in registry.parameters() if info in infos and is_cut(parameter, info)]
    full = owner.full_parameters([info.name for info in cut]) if cut else {}
    inside: dict[str, Tensor] = {info.name: parameter for info, parameter in registry.parameters() if info in infos}
    inside |= {
        name: nn.Parameter(value, requires_grad=registry.by_name[name].trainable) for name, value in full.items()
    }
    before = {n: p.detach().clone() for n, p in inside.items()} if modifier_rank is not None else {}
    held = [_Held(owner.module, name, inside[info.name]) for info in cut for name in (info.name, *info.aliases)]
    try:
        yield inside
    finally:
        for place in held:
            place.restore()
    if modifier_rank is not None:
        _adopt(owner, infos, inside, before, modifier_rank)


def is_cut(parameter: Tensor, info: ParameterInfo) -> bool:
    """Whether this rank's object is not the whole parameter (a DTensor says so by its type)."""
    return hasattr(parameter, "to_local") or tuple(parameter.shape) != info.global_shape


class _Held:
    """A module's parameter, replaced by a whole one until `restore`."""

    def __init__(self, model: nn.Module, name: str, whole: Tensor) -> None:
        path, _, self._key = name.rpartition(".")
        self._module = model.get_submodule(path)
        self._before = self._module.get_parameter(self._key)
        setattr(self._module, self._key, whole)

    def restore(self) -> None:
        setattr(self._module, self._key, self._before)


@torch.no_grad()
def _adopt(
    owner: LocalState,
    infos: list[ParameterInfo],
    inside: dict[str, Tensor],
    before: dict[str, Tensor],
    modifier_rank: int,
) -> None:
    """Give the modifier's values to all; masters follow where an element has changed, and keep their bits elsewhere."""
    control = ShardGroup.of(owner.mesh, "control", owner.ledger)
    with owner.ledger.apart("state"):
        for info in infos:
            control.broadcast(inside[info.name].data, modifier_rank)
    indices = {info.index for info in infos}
    for shard in owner._all_shards():
        if shard.info.index not in indices:
            continue
        new, old = (shard.part_of(values[shard.info.name]).view(-1) for values in (inside, before))
        master = shard.parameter.view(-1)
        if master.data_ptr() != new.data_ptr():
            master.copy_(torch.where(new != old, new.to(master.dtype), master))
    with owner.ledger.apart("state"):
        owner.roles.reduction.publish()
