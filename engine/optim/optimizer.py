"""The optimizer that `initialize` gives to users: one torch.optim.Optimizer over the optimizers that really step.

The engine owns the step (unscale, clip, update, schedule), so users read this object, schedule it and hook into it, but
they do not step it. Its parameter groups are the inner optimizers' own dicts and its state is theirs: a learning rate
set on either side is set on both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from engine import torch_compat
from engine.contracts import EngineError
from engine.optim.json_state import decode, encode
from engine.optim.optimizer_state import create_state, restore_entry

_LAYOUT_KEYS = ("params", "param_names", "global_index", "num_global", "global_ndim", "exp_avg_mask")
"""Group entries that say where parameters lie on this rank, and the script's masks; never saved, never loaded."""

_IMPLEMENTATION_KEYS = ("foreach", "fused", "capturable", "differentiable")
"""Group entries that choose a kernel on this machine; never loaded."""


@runtime_checkable
class OwnReduction(Protocol):
    """What an optimizer has more where it reduces by itself (engine/optim/compressed.py)."""

    def scalars(self) -> Mapping[str, float]: ...
    def settle(self) -> None: ...
    def rank_tensors(self, create: bool = False) -> dict[str, torch.Tensor]: ...
    def state_was_loaded(self) -> None: ...


class EngineOptimizer(torch.optim.Optimizer):
    """One optimizer with the union of ``inner``'s parameter groups. Every group carries unique ``param_names``.

    ``overflow`` is True after a step that was skipped because a gradient was not finite; the engine sets it.
    """

    def __init__(self, inner: Sequence[torch.optim.Optimizer]) -> None:
        self.inner = tuple(inner)
        self.overflow = False
        self._gradient_factor: float | None = None
        self._complete = False
        self._divisors: dict[torch.device, torch.Tensor] = {}
        self._read_loss_scale: Callable[[], float] = lambda: 1.0
        self._zero_gradients: Callable[[], None] | None = None
        self._write_state: Callable[[], dict[str, Any]] | None = None
        self._read_state: Callable[[dict[str, Any]], None] | None = None
        # Schedulers ask `defaults` what they may cycle ("betas", "momentum"): only what every group has.
        shared = set.intersection(*(set(optimizer.defaults) for optimizer in self.inner))
        defaults = {key: value for key, value in self.inner[0].defaults.items() if key in shared}
        super().__init__([group for optimizer in self.inner for group in optimizer.param_groups], defaults)
        self._complete = True
        self._adopt()
        self._check_names()

    def _adopt(self) -> None:
        """Make groups and state the same objects here and inside."""
        self.param_groups = [group for optimizer in self.inner for group in optimizer.param_groups]
        if len(self.inner) == 1:
            self.state = self.inner[0].state
            return
        self.state.clear()
        for optimizer in self.inner:
            self.state.update(optimizer.state)
        for optimizer in self.inner:
            optimizer.state = self.state

    def _check_names(self) -> None:
        seen: set[str] = set()
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names")
            if names is None or len(names) != len(group["params"]):
                raise EngineError(f"Parameter group {index} of the optimizer needs one name per parameter.")
            for name in names:
                if name in seen:
                    raise EngineError(f"The parameter {name} is in the optimizer twice; give it to one group, once.")
                seen.add(name)

    def bind(
        self,
        *,
        loss_scale: Callable[[], float] | None = None,
        zero_gradients: Callable[[], None] | None = None,
        state_dict: Callable[[], dict[str, Any]] | None = None,
        load_state_dict: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Connect to the engine: where the loss scale is read, and who zeroes gradients and (un)packs whole state.

        What is not given stays as it is; without a binding `zero_grad` and the state dicts act on this rank's tensors.
        """
        self._read_loss_scale = loss_scale or self._read_loss_scale
        self._zero_gradients = zero_gradients or self._zero_gradients
        self._write_state = state_dict or self._write_state
        self._read_state = load_state_dict or self._read_state

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward (1.0 outside fp16)."""
        return self._read_loss_scale()

    # --- the step ------------------------------------------------------------------------------------------

    def apply(self, gradient_factor: float = 1.0) -> None:
        """Update every parameter from its gradient times ``gradient_factor`` (1 / loss scale times the clipping).

        Fused optimizers apply the factor inside their kernel, which saves a pass over all gradients; the others are
        handed multiplied gradients. Either way ``grad`` holds the multiplied gradient afterwards.
        """
        self._gradient_factor = float(gradient_factor)
        try:
            # Through `step`, as users patched it: their step hooks run, and a learning-rate scheduler, which wraps
            # this very method, sees that the optimizer stepped before it did.
            self.step()
        finally:
            self._gradient_factor = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Refused outside the engine: it must unscale, clip and agree with the other ranks first."""
        if self._gradient_factor is None:
            raise EngineError("The engine steps this optimizer: call engine.step() instead of optimizer.step().")
        for optimizer in self.inner:
            self._step_inner(optimizer, self._gradient_factor)

    def _step_inner(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            _fill_missing_momenta(optimizer)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        in_kernel = torch_compat.unscales_in_step(optimizer) and all(g.get("fused") for g in optimizer.param_groups)
        if factor == 1.0 or not gradients:
            optimizer.step()
        elif in_kernel and factor != 0.0:
            # The protocol of torch.amp.GradScaler: the kernel divides by `grad_scale`, a tensor on the device.
            optimizer.grad_scale = self._divisor(1.0 / factor, gradients[0].device)  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale  # type: ignore[attr-defined]
        else:
            torch_compat.foreach_mul_(gradients, factor)
            optimizer.step()

    def _divisor(self, value: float, device: torch.device) -> torch.Tensor:
        if device not in self._divisors:
            self._divisors[device] = torch.empty((), dtype=torch.float32, device=device)
        # Filled, not made anew: a fill needs no copy from the host and so does not wait for the device.
        return self._divisors[device].fill_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing, inside an engine: `engine.step` has cleared the gradients by then, and in the middle of a window
        they are not the loop's to drop (`engine.zero_grad` does it)."""
        if self._zero_gradients is None:
            super().zero_grad(set_to_none)
        else:
            self._zero_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the engine has placed and sharded the parameters by then."""
        if self._complete:
            raise EngineError(
                "Parameter groups cannot be added once the engine is built; give them all to initialize(), as "
                "model_parameters or in the optimizer."
            )
        super().add_param_group(param_group)

    # --- state by parameter name ---------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], str, torch.Tensor]]:
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    yield optimizer, group, name, parameter

    def initialize_state(self, names: Collection[str] | None = None) -> None:
        """Create the state that the named parameters (default: all) have before their first step, where there is none.

        No parameter changes by a bit, no step is counted, no hook runs. One optimizer cannot tell an empty state from
        a fresh one: SGD with dampening, whose first step is not dampened; load all of its state after this.
        """
        stand_in = None
        for optimizer, group, name, parameter in self._named():
            if (names is None or name in names) and not optimizer.state.get(parameter):
                stand_in = create_state(optimizer, group, parameter, stand_in)

    def forget_state(self, names: Collection[str]) -> None:
        """Put the named parameters back to before their first step."""
        forgotten = [(o, group, name, p) for o, group, name, p in self._named() if name in names]
        for optimizer, _, _, parameter in forgotten:
            optimizer.state.pop(parameter, None)
        # Adagrad is the one that makes its state when it is built, and needs it in its first step
        self.initialize_state([name for o, _, name, _ in forgotten if isinstance(o, torch.optim.Adagrad)])

    def named_state(self) -> dict[str, dict[str, Any]]:
        """The state of this rank's parameters by name: the live tensors (local shapes) and scalars, not copies."""
        return {name: dict(self.state[p]) for _, _, name, p in self._named() if self.state.get(p)}

    def load_named_state(self, named: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Write saved state (local shapes) in place; creates what is missing first.

        Returns what could not be restored, one ``NAME: KEYS`` each. Raises EngineError where shapes differ.
        """
        self.initialize_state(named)
        local = {name: parameter for _, _, name, parameter in self._named()}
        not_restored = [f"{name}: not a parameter of this optimizer" for name in named if name not in local]
        for name, saved in named.items():
            if name not in local:
                continue
            state = self.state[local[name]]
            unmatched = sorted(set(saved) ^ set(state))
            if unmatched:
                not_restored.append(f"{name}: {', '.join(unmatched)}")
            for key in saved.keys() & state.keys():
                if not restore_entry(state, key, saved[key]):
                    raise EngineError(
                        f"The optimizer state {key} of {name} has shape {tuple(torch.as_tensor(saved[key]).shape)} in "
                        f"the checkpoint and {tuple(torch.as_tensor(state[key]).shape)} here; the model has changed."
                    )
        return not_restored

    # --- of optimizers that reduce by themselves -----------------------------------------------------------

    def _reducing(self) -> list[OwnReduction]:
        return [optimizer for optimizer in self.inner if isinstance(optimizer, OwnReduction)]

    def scalars(self) -> dict[str, float]:
        """What the optimizers inside say of themselves to the monitors."""
        return {name: value for optimizer in self._reducing() for name, value in optimizer.scalars().items()}

    def settle(self) -> None:
        """Collective. Bring parameters together that differ between ranks."""
        for optimizer in self._reducing():
            optimizer.settle()

    def rank_tensors(self, create: bool = False) -> dict[str, torch.Tensor]:
        """Live tensors that belong to this rank alone, by name; ``create`` makes those that no step has made yet."""
        return {name: value for optimizer in self._reducing() for name, value in optimizer.rank_tensors(create).items()}

    def state_was_loaded(self) -> None:
        for optimizer in self._reducing():
            optimizer.state_was_loaded()

    # --- options -------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> list[str]:
        """The classes that really step (Muon brings an AdamW along)."""
        return [type(optimizer).__name__ for optimizer in self.inner]

    def group_options(self) -> list[dict[str, Any]]:
        """The options of every parameter group as JSON (lr, betas, counters some optimizers keep there)."""
        return [
            encode({key: value for key, value in group.items() if key not in _LAYOUT_KEYS}, f"param_groups[{index}]")
            for index, group in enumerate(self.param_groups)
        ]

    def load_group_options(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore what `group_options` gave; the choice of kernels stays this machine's. Raises EngineError."""
        if len(saved) != len(self.param_groups):
            raise EngineError(
                f"The checkpoint holds {len(saved)} parameter groups, but this optimizer has {len(self.param_groups)}."
            )
        for group, options in zip(self.param_groups, saved, strict=True):
            for key, value in decode(dict(options)).items():
                if key in (*_IMPLEMENTATION_KEYS, *_LAYOUT_KEYS):
                    continue
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(float(value))
                else:
                    group[key] = value

    # --- torch's state dicts -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Whole state where the engine is bound to it, else torch's format over this rank's tensors."""
        return self._write_state() if self._write_state is not None else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if self._read_state is not None:
            self._read_state(state_dict)
            return
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise EngineError(f"The state dict holds {len(groups)} parameter groups, not {len(self.param_groups)}.")
        first = 0
        for optimizer in self.inner:
            kept = [{key: group[key] for key in _LAYOUT_KEYS if key in group} for group in optimizer.param_groups]
            part = groups[first : first + len(kept)]
            ids = {i for group in part for i in group["params"]}
            state = {i: entry for i, entry in state_dict["state"].items() if i in ids}
            optimizer.load_state_dict({"state": state, "param_groups": part})
            for group, layout in zip(optimizer.param_groups, kept, strict=True):
                group.update(layout)
            first += len(kept)
        self._adopt()


def _fill_missing_momenta(optimizer: torch.optim.SGD) -> None:
    """Give SGD's late parameters a momentum of zero, which is what no gradient so far means.

    torch's fused SGD takes either no momentum buffer or all of them; a parameter whose first gradient comes later than
    the others' (a dropped layer, an expert without tokens) would stop it.
    """
    for group in optimizer.param_groups:
        if not group["momentum"] or not group["fused"]:
            continue
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        missing = [p for p in params if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if len(missing) < len(params):
            for parameter in missing:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
