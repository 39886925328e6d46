"""From an `OptimizerPlan` to the optimizers that step on this rank's parameters (JSON section ``optimizer``)."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch

from engine.contracts import EngineError
from engine.optim.compressed import CompressedOptimizer
from engine.optim.lamb import Lamb, NormReduce
from engine.optim.lion import Lion
from engine.optim.onebit_adam import OneBitAdam
from engine.optim.onebit_lamb import OneBitLamb
from engine.optim.optimizer import EngineOptimizer
from engine.optim.signatures import check_parameters, described
from engine.optim.zero_one_adam import ZeroOneAdam
from engine.plan.plan import OptimizerPlan

Granularity = Literal["elementwise", "whole", "flat"]

_OWN: dict[str, type[torch.optim.Optimizer]] = {
    "Lamb": Lamb,
    "Lion": Lion,
    "OneBitAdam": OneBitAdam,
    "ZeroOneAdam": ZeroOneAdam,
    "OneBitLamb": OneBitLamb,
}

_REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the loss several times within one step and needs products over all parameters",
    torch.optim.SparseAdam: "it needs sparse gradients, and the engine's are dense; use Adam",
}

# Every element's update depends on that element's own gradient and state alone, so any slice may step by itself. Lamb
# counts here because it gets its two norms per parameter through `norm_reduce`. Adafactor (row and column means) and
# Muon (orthogonalisation) need whole matrices; of a class that is not listed nothing is known, so it gets them too.
_ELEMENTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        Lamb,
        Lion,
    }
)

_NOT_FOR_MUON = ("embed", "lm_head")


def available_optimizers() -> list[str]:
    """Every name without a dot that `optimizer_class` accepts."""
    found = [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value not in _REFUSED
    ]
    return sorted({*found, *_OWN} - {"Optimizer"})


def optimizer_class(type_name: str) -> type[torch.optim.Optimizer]:
    """The class behind ``optimizer.type``: torch's or ours by name, any other by its dotted path.

    Raises EngineError for a name that does not exist, is not an optimizer, or cannot work here.
    """
    cls = _imported(type_name) if "." in type_name else _known(type_name)
    refuse_unusable(cls)
    return cls


def refuse_unusable(cls: type[torch.optim.Optimizer]) -> None:
    """Raise EngineError, with the reason, for the optimizers that cannot work inside an engine step."""
    for refused, reason in _REFUSED.items():
        if issubclass(cls, refused):
            raise EngineError(f"The optimizer {cls.__name__} cannot be used here: {reason}.")


def _known(type_name: str) -> type[torch.optim.Optimizer]:
    found = _OWN.get(type_name, getattr(torch.optim, type_name, None))
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found
    by_lower = {name.lower(): name for name in available_optimizers()}
    near = difflib.get_close_matches(type_name.lower(), by_lower, n=1)
    hint = f" Did you mean {by_lower[near[0]]!r}?" if near else ""
    raise EngineError(
        f"optimizer.type {type_name!r} is unknown.{hint} Known: {', '.join(by_lower.values())}; "
        "any other by its dotted path, such as package.module.ClassName."
    )


def _imported(path: str) -> type[torch.optim.Optimizer]:
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EngineError(
            f"optimizer.type {path!r}: the module {module_name!r} cannot be imported: {error}."
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise EngineError(f"optimizer.type {path!r}: the module {module_name!r} has no {attribute!r}.")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise EngineError(f"optimizer.type {path!r} is not a subclass of torch.optim.Optimizer.")
    return found


def granularity(optimizer: str | type[torch.optim.Optimizer]) -> Granularity:
    """Whether an optimizer may step on any 1-D slice of a parameter, needs ``whole`` ones (the safe answer), or steps
    on ``flat`` buckets and reduces by itself (the 1-bit family)."""
    cls = optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
    if issubclass(cls, CompressedOptimizer):
        return "flat"
    return "elementwise" if cls in _ELEMENTWISE else "whole"


def granularity_of(plan: OptimizerPlan | None, client: torch.optim.Optimizer | None) -> Granularity:
    """`granularity` of the optimizer that will step: the client's, else the JSON's."""
    if client is not None:
        return granularity(type(client))
    return granularity(plan.type) if plan is not None else "elementwise"


def fused_arguments(cls: type[torch.optim.Optimizer], device: torch.device) -> dict[str, Any]:
    """``{"fused": True}`` where ``cls`` has a one-kernel step on that kind of device, else torch's own choice."""
    # mypy takes the class's __hash__ for its instances'.
    fused = _has_fused_step(cls, device.type)  # type: ignore[arg-type]
    return {"fused": True} if fused else {}


@functools.cache
def _has_fused_step(cls: type[torch.optim.Optimizer], device_type: str) -> bool:
    if "fused" not in inspect.signature(cls).parameters:
        return False
    # Which optimizers are fused on which device changes with every torch release and is listed nowhere: one is tried.
    try:
        parameter = torch.nn.Parameter(torch.zeros(1, device=device_type))
        parameter.grad = torch.zeros_like(parameter)
        cls([parameter], fused=True).step()  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def muon_takes(name: str, num_dimensions: int) -> bool:
    """Whether Muon's matrix update, rather than its AdamW, is for this parameter: a hidden matrix, by DeepSpeed's rule.

    torch's Muon takes exactly two dimensions, so a convolution's weight goes to AdamW. Only these need to be whole.
    """
    return num_dimensions == 2 and not any(word in name for word in _NOT_FOR_MUON)


def build_optimizer(
    plan: OptimizerPlan, groups: Sequence[dict[str, Any]], *, norm_reduce: NormReduce | None = None
) -> EngineOptimizer:
    """The user-facing optimizer over `build_inner_optimizers`."""
    return EngineOptimizer(build_inner_optimizers(plan, groups, norm_reduce=norm_reduce))


def build_inner_optimizers(
    plan: OptimizerPlan, groups: Sequence[dict[str, Any]], *, norm_reduce: NormReduce | None = None
) -> list[torch.optim.Optimizer]:
    """The optimizers that step: one, or for Muon two (matrices, then AdamW for the rest).

    ``groups``: torch parameter groups of this rank, each with ``params`` (fp32, local; possibly none), ``names`` (one
    per parameter) and the user's own options, which win over ``plan.params``; Lamb's position keys are described there.
    Muon's ``plan.params`` are ``{"muon": {...}, "adam": {...}}``, and every group becomes two, also when one of them is
    empty, so that all ranks have the same groups. Raises EngineError for parameters that do not suit the class.
    """
    named = [_with_param_names(group) for group in groups]
    cls = optimizer_class(plan.type)
    if cls is torch.optim.Muon:
        return _build_muon(plan, named)
    params = dict(plan.params)
    if cls is Lamb and norm_reduce is not None:
        params["norm_reduce"] = norm_reduce
    return [_construct(cls, named, params, "optimizer.params")]


def _with_param_names(group: dict[str, Any]) -> dict[str, Any]:
    renamed = {key: value for key, value in group.items() if key != "names"}
    # torch knows the names of a group's parameters under this key.
    renamed["param_names"] = list(group["names"] if "names" in group else group["param_names"])
    return renamed


def _build_muon(plan: OptimizerPlan, groups: Sequence[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    stray = sorted(set(plan.params) - {"muon", "adam"})
    if stray:
        raise EngineError(
            f"optimizer.params of Muon are split into 'muon' and 'adam'; {', '.join(stray)} is in neither."
        )
    matrices = [_selected(group, matrices=True) for group in groups]
    others = [_selected(group, matrices=False) for group in groups]
    return [
        _construct(torch.optim.Muon, matrices, plan.params.get("muon", {}), "optimizer.params"),
        _construct(torch.optim.AdamW, others, plan.params.get("adam", {}), "optimizer.params"),
    ]


def _selected(group: dict[str, Any], *, matrices: bool) -> dict[str, Any]:
    dimensions = group.get("global_ndim") or [parameter.ndim for parameter in group["params"]]
    names = group["param_names"]
    kept = [i for i, name in enumerate(names) if muon_takes(name, dimensions[i]) == matrices]
    per_parameter = [key for key in ("params", "param_names", "global_index", "global_ndim") if key in group]
    return {**group, **{key: [group[key][i] for i in kept] for key in per_parameter}}


def _construct(
    cls: type[torch.optim.Optimizer], groups: Sequence[dict[str, Any]], params: dict[str, Any], path: str
) -> torch.optim.Optimizer:
    if "max_grad_norm" in params:
        raise EngineError(
            f"{path}.max_grad_norm is not an optimizer's business here; use the top-level gradient_clipping."
        )
    check_parameters(cls, params, path)
    arguments: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in params.items()
    }
    device = next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))
    chosen_by_user = any(arguments.get(key) is not None for key in ("fused", "foreach", "differentiable"))
    # Dampened SGD treats its first step unlike the others, which the fused kernel decides for all parameters at once.
    if not chosen_by_user and not arguments.get("dampening"):
        arguments |= fused_arguments(cls, device)
    try:
        return cls([dict(group) for group in groups], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise EngineError(f"{path} do not suit {cls.__name__}: {error}. It takes {described(cls)}.") from error
