"""Reading and editing whole state by name, as part of an engine.

Every method is called by all ranks with the same names; a call that only some ranks make is refused on all of them.
Many names in one call cost as few collectives as one.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.collectives.agreement import Agreement
from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.collectives.whole import Piece, gather_whole, join_parts
from engine.config.suggest import nearest
from engine.contracts import EngineError
from engine.cut import Cut
from engine.mesh import Mesh
from engine.parameters import ParameterInfo, ParameterRegistry

if TYPE_CHECKING:
    from engine.model.zero.shards import ParameterShard
    from engine.optim.optimizer import EngineOptimizer

Values = Mapping[str, Tensor]


class FullState(ABC):
    """The part of an `Engine` that hands out and takes in whole tensors."""

    module: nn.Module
    mesh: Mesh
    parameter_registry: ParameterRegistry
    optimizer: EngineOptimizer | None
    roles: Any
    _agreement: Agreement
    ledger: Ledger
    _window: Any
    _frozen: list[ParameterShard]

    @abstractmethod
    def _divisor(self, count: float) -> float: ...

    def _bind_optimizer(self) -> None:
        """Let `optimizer.state_dict` be of whole state."""
        if self.optimizer is not None:
            self.optimizer.bind(state_dict=self._optimizer_state_dict, load_state_dict=self._load_optimizer_state_dict)

    # --- parameters ------------------------------------------------------------------------------------------

    def full_parameter(self, name: str) -> Tensor:
        """A copy of the parameter, whole, on this rank's device: the fp32 master where there is one, at every stage."""
        return self.full_parameters([name])[name]

    def full_parameters(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Copies of the parameters (default: all, frozen ones too), whole, by the names that were asked for.

        Raises EngineError for a name that the model does not have.
        """
        wanted = self._names(names)
        self._agree_on("full_parameters", wanted)
        self._bring_together()
        infos = self._infos(wanted)
        indices = {info.index for info in infos.values()}
        pieces = [self._piece(s, s.parameter) for s in self._all_shards() if s.info.index in indices]
        whole = self._gather(pieces)
        return {name: self._or_zeros(whole, info, info.dtype) for name, info in infos.items()}

    def set_full_parameter(self, name: str, value: Tensor) -> None:
        """`set_full_parameters` for one."""
        self.set_full_parameters({name: value})

    @torch.no_grad()
    def set_full_parameters(self, values: Values) -> None:
        """Write whole parameters: masters, and what forward reads. All ranks give the same values.

        Optimizer state stays as it is. Raises EngineError for unknown names and other shapes, before anything changes.
        """
        self._agree_on("set_full_parameters", list(values), values)
        infos = self._infos(values, values)
        self._bring_together()
        given = {info.index: values[name] for name, info in infos.items()}
        for shard in self._all_shards():
            if shard.info.index in given:
                shard.parameter.copy_(shard.part_of(given[shard.info.index]))
        self.roles.reduction.publish()

    # --- gradients -------------------------------------------------------------------------------------------

    def full_gradient(self, name: str) -> Tensor:
        """`full_gradients` for one."""
        return self.full_gradients([name])[name]

    @torch.no_grad()
    def full_gradients(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Copies of the gradients (default: of all trained parameters), whole, between backward and step.

        As the optimizer would get them, before clipping: the mean over ranks, unscaled, divided by the accumulation
        steps, of the micro-batches that have come. Zeros where there is no gradient. Reduces what waits, so stages 0
        and 1 communicate earlier than they would. Raises EngineError where no backward has come since the last step,
        and for a frozen parameter; and for one whose gradients a 1-bit optimizer leaves on their ranks.
        """
        wanted = self._names(names, trained=True)
        divisor = self._begin_gradients("full_gradients", wanted)
        infos = self._trained(wanted)
        unreduced = self.roles.reduction.unreduced()
        if local := [name for name, info in infos.items() if info.index in unreduced]:
            raise EngineError(
                f"full_gradients: {_some(local)} travels as 1-bit momentum in this step, so its gradient is "
                "averaged nowhere; read it in the warm-up, or the averaged momentum, full_optimizer_states()"
            )
        indices = {info.index for info in infos.values()}
        pieces = [
            self._piece(shard, shard.parameter.grad / divisor)
            for shard in self.roles.reduction.shards
            if shard.info.index in indices and shard.parameter.grad is not None
        ]
        whole = self._gather(pieces)
        return {name: self._or_zeros(whole, info, torch.float32) for name, info in infos.items()}

    def set_full_gradient(self, name: str, value: Tensor) -> None:
        """`set_full_gradients` for one."""
        self.set_full_gradients({name: value})

    @torch.no_grad()
    def set_full_gradients(self, values: Values) -> None:
        """Write gradients between backward and step, in the units of `full_gradients`; later backwards add to them."""
        divisor = self._begin_gradients("set_full_gradients", list(values), values)
        infos = self._trained(values, values)
        given = {info.index: values[name] for name, info in infos.items()}
        for shard in self.roles.reduction.shards:
            if shard.info.index in given:
                if shard.parameter.grad is None:
                    shard.parameter.grad = torch.zeros_like(shard.parameter)
                gradient = shard.part_of(given[shard.info.index]).to(shard.parameter.device, torch.float32)
                shard.parameter.grad.copy_(gradient * divisor)
        self.roles.reduction.adopt_gradients(set(given))

    # --- optimizer state -------------------------------------------------------------------------------------

    def full_optimizer_state(self, name: str, key: str) -> Tensor:
        """`full_optimizer_states` for one."""
        return self.full_optimizer_states([name], key)[name]

    def full_optimizer_states(self, names: Iterable[str] | None = None, key: str = "exp_avg") -> dict[str, Tensor]:
        """Copies of the optimizer's state ``key`` (``exp_avg``, ``step``, ...), whole, by name.

        Raises EngineError where there is none: an unknown key, or a parameter that has not been stepped yet.
        """
        wanted = self._names(names, trained=True)
        self._agree_on(f"full_optimizer_states({key})", wanted)
        self._bring_together()
        infos = self._trained(wanted)
        whole = self._gather(self._state_pieces({info.index for info in infos.values()}, key))
        missing = [name for name, info in infos.items() if (info.name, key) not in whole]
        if missing:
            found = self._gather(self._state_pieces({info.index for info in infos.values()}))
            keys = sorted({str(found_key) for _, found_key in found})
            has = f"it has {', '.join(keys)}" if keys else "state begins with the first step that is applied"
            raise EngineError(f"the optimizer has no state {key!r} for {_some(missing)}; {has}")
        return {name: whole[info.name, key] for name, info in infos.items()}

    def set_full_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        """`set_full_optimizer_states` for one."""
        self.set_full_optimizer_states({name: value}, key)

    @torch.no_grad()
    def set_full_optimizer_states(self, values: Values, key: str) -> None:
        """Write the optimizer's state ``key``; state that is not there yet is created first, as before a first step."""
        self._agree_on(f"set_full_optimizer_states({key})", list(values), values)
        infos = self._trained(values)
        self._bring_together()
        given = {info.name: values[name] for name, info in infos.items()}
        optimizer = self._optimizer()
        optimizer.initialize_state(given.keys())
        named = optimizer.named_state()
        for shard in self.roles.reduction.shards:
            if shard.info.name not in given:
                continue
            state, value = named.get(shard.info.name, {}), given[shard.info.name]
            held = state.get(key)
            if held is None:
                raise EngineError(
                    f"the optimizer has no state {key!r} for {shard.info.name}; it has {', '.join(state)}"
                )
            if (
                isinstance(held, Tensor)
                and held.shape == shard.parameter.shape
                and value.numel() == shard.info.global_numel
            ):
                held.copy_(shard.part_of(value))
            else:
                optimizer.load_named_state({shard.info.name: {**state, key: value}})

    # --- state dicts of the optimizer ------------------------------------------------------------------------

    def _optimizer_state_dict(self) -> dict[str, Any]:
        """``{"state": {name: {key: whole tensor}}, "param_groups": [...]}``, by parameter name. All ranks call it."""
        optimizer, trained = self._optimizer(), [info.name for info in self._all_trained()]
        self._agree_on("optimizer.state_dict", trained)
        self._bring_together()
        whole = self._gather(self._state_pieces({info.index for info in self._all_trained()}))
        state: dict[str, dict[str, Tensor]] = {}
        for name, key in sorted(whole, key=str):
            state.setdefault(name, {})[key] = whole[name, key]
        groups = []
        group_of = self._gather([Piece((n, i), (), 0, torch.zeros(())) for n, i in _names_by_group(optimizer)])
        for index, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in _LAYOUT}
            members = {name for name, i in group_of if i == index}
            groups.append({**options, "params": [name for name in trained if name in members]})
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def _load_optimizer_state_dict(self, saved: dict[str, Any]) -> None:
        """The inverse. Raises EngineError for a state dict that is not by name."""
        optimizer = self._optimizer()
        strange = [name for name in saved["state"] if name not in self.parameter_registry.by_name]
        if strange:
            raise EngineError(
                f"this optimizer's state is by parameter name, and {strange[0]!r} is none of this model's; give it "
                "what optimizer.state_dict() of an engine returned, or load a checkpoint"
            )
        optimizer.initialize_state(saved["state"].keys())
        named = optimizer.named_state()
        mine: dict[str, dict[str, Any]] = {}
        for shard in self.roles.reduction.shards:
            for key, value in saved["state"].get(shard.info.name, {}).items():
                held = named.get(shard.info.name, {}).get(key)
                is_cut = isinstance(held, Tensor) and held.shape == shard.parameter.shape
                cut = is_cut and value.numel() == shard.info.global_numel
                mine.setdefault(shard.info.name, {})[key] = shard.part_of(value) if cut else value
        optimizer.load_named_state(mine)
        for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for key, value in options.items():
                if key not in (*_LAYOUT, *_IMPLEMENTATION):
                    group[key] = value

    # --- inside ----------------------------------------------------------------------------------------------

    def _bring_together(self) -> None:
        """Whole state is that of all ranks; 0/1 Adam's differ between two synchronisations, so this is one more."""
        if self.optimizer is not None:
            with self.ledger.apart("state"):
                self.optimizer.settle()

    def _optimizer(self) -> EngineOptimizer:
        if self.optimizer is None:
            raise EngineError("there is no optimizer: add an 'optimizer' section to the config or pass optimizer=")
        return self.optimizer

    def _all_shards(self) -> list[ParameterShard]:
        return [*self.roles.reduction.shards, *self._frozen]

    def _all_trained(self) -> list[ParameterInfo]:
        return [info for info in self.parameter_registry.infos if info.group is not None]

    def _names(self, names: Iterable[str] | None, trained: bool = False) -> list[str]:
        if isinstance(names, str):
            return [names]
        if names is not None:
            return list(names)
        return [info.name for info in (self._all_trained() if trained else self.parameter_registry.infos)]

    def _agree_on(self, call: str, names: list[str], values: Values | None = None, **more: Tensor | float) -> dict:
        """One small all-reduce: every rank makes this very call, with these values. Raises EngineError on all ranks."""
        checksum = zlib.crc32("\n".join(names).encode())
        for value in (values or {}).values():
            data = value.detach().cpu().contiguous().flatten()
            checksum = zlib.crc32(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"", checksum)
        what = f"{call} of {_some(names)}" + (f" with values of checksum {checksum:08x}" if values else "")
        with self.ledger.apart("state"):
            return self._agreement.sum(more, what)

    def _infos(self, names: Iterable[str], values: Values | None = None) -> dict[str, ParameterInfo]:
        registry = self.parameter_registry
        infos: dict[str, ParameterInfo] = {}
        problems = []
        for name in names:
            info = registry.by_name.get(registry.aliases.get(name, name))
            if info is None:
                close = nearest(name, [*registry.by_name, *registry.aliases])
                problems.append(
                    f"the model has no parameter {name!r}" + (f"; did you mean {close!r}?" if close else "")
                )
            elif values is not None and tuple(values[name].shape) != info.global_shape:
                given = tuple(values[name].shape)
                problems.append(f"{name} has the shape {info.global_shape}, and the value given {given}")
            else:
                infos[name] = info
        if problems:
            raise EngineError("; ".join(problems))
        return infos

    def _trained(self, names: Iterable[str], values: Values | None = None) -> dict[str, ParameterInfo]:
        infos = self._infos(names, values)
        frozen = [name for name, info in infos.items() if info.group is None]
        if frozen:
            raise EngineError(f"{_some(frozen)} is not trained here: no gradient and no optimizer state")
        return infos

    def _begin_gradients(self, call: str, names: list[str], values: Values | None = None) -> float:
        """Complete what has come of the gradients; returns what the sums are divided by."""
        reduction = self.roles.reduction
        agreed = self._agree_on(call, names, values, count=self._window.count, arrived=bool(reduction.scales()))
        if not agreed["arrived"]:
            raise EngineError(
                f"{call}: there are no gradients; they exist between backward() and the step that uses them"
            )
        reduction.finish()
        return self.roles.precision.scale * self._divisor(agreed["count"])

    def _piece(self, shard: ParameterShard, values: Tensor) -> Piece:
        return Piece(shard.info.name, shard.info.shape, shard.start, values)

    def _state_pieces(self, indices: set[int], key: str | None = None) -> list[Piece]:
        named = self._optimizer().named_state()
        pieces = []
        for shard in self.roles.reduction.shards:
            if shard.info.index not in indices:
                continue
            for found, value in named.get(shard.info.name, {}).items():
                if value is None or (key is not None and found != key):
                    continue
                if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
                    pieces.append(Piece((shard.info.name, found), shard.info.shape, shard.start, value))
                elif shard.start == 0:  # a step count, say: the same on all shards
                    whole = torch.as_tensor(value)
                    pieces.append(Piece((shard.info.name, found), tuple(whole.shape), 0, whole))
        return pieces

    def _gather(self, pieces: list[Piece]) -> dict[Any, Tensor]:
        """By key (a parameter's name, or a tuple that begins with it), whole on every rank."""
        shards, parts, stages = (ShardGroup.of(self.mesh, axis, self.ledger) for axis in ("dp_shard", "tp", "pp"))
        with self.ledger.apart("state"):
            whole = gather_whole(pieces, shards, self.mesh.device)
            whole = join_parts(whole, self._cuts(whole), parts, self.mesh.device)
            if stages.size == 1:
                return whole
            return gather_whole([Piece(k, tuple(t.shape), 0, t) for k, t in whole.items()], stages, self.mesh.device)

    def _cuts(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Cut]:
        """How those of ``tensors`` that are parts of layers split over tp ranks lie over them."""
        infos = {key: self.parameter_registry.by_name[key[0] if isinstance(key, tuple) else key] for key in tensors}
        return {
            key: info.cut
            for key, info in infos.items()
            if info.cut is not None and tuple(tensors[key].shape) == info.shape
        }

    def _or_zeros(self, whole: Mapping[Any, Tensor], info: ParameterInfo, dtype: torch.dtype) -> Tensor:
        found = whole.get(info.name)
        return found if found is not None else torch.zeros(info.global_shape, dtype=dtype, device=self.mesh.device)


_LAYOUT = ("params", "param_names", "global_index", "num_global", "global_ndim")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def _names_by_group(optimizer: EngineOptimizer) -> list[tuple[str, int]]:
    return [(name, index) for index, group in enumerate(optimizer.param_groups) for name in group["param_names"]]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
