"""The optimizer a config means: its canonical name and the parameters its constructor gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.plan.one_bit import ONE_BIT, note_consumed
from engine.plan.optimizer_table import (
    DECOUPLED_DECAY_OF_TORCH,
    MUON_ADAM_GROUP,
    MUON_GROUP,
    OPTIMIZERS,
    UNUSABLE,
)
from engine.plan.plan import OptimizerPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

PATH = "optimizer.type"
PARAMS = "optimizer.params"


def resolve_optimizer(config: Config, findings: Findings) -> OptimizerPlan | None:
    """None when the JSON names no optimizer (the client may bring one) or one that cannot be used here.

    The config has brought known names to their canonical spelling and checked the names of their parameters.
    """
    section = config.optimizer
    if section is None:
        return None
    name, given = section.type, section.params
    if name is None:
        return None
    if name in UNUSABLE:
        repair = "choose another optimizer"
        options = tuple(OPTIMIZERS)
        findings.problem(
            PATH, f"{name} {UNUSABLE[name]}", found=name, repair=repair, code="unusable-type", options=options
        )
        return None
    if name not in OPTIMIZERS:
        if PATH in config.not_built:
            return None
        findings.resolved(PATH, name, "a class of your own; its parameters are checked when it is made")
        return OptimizerPlan(name.replace(":", "."), dict(given))
    spec = OPTIMIZERS[name]
    for key in spec.consumed.keys() & given.keys():
        _check_consumed(name, key, given[key], spec.consumed[key], findings)
        if name in ONE_BIT:
            note_consumed(name, key, given[key], findings)
    kept = {key: _frozen(value) for key, value in given.items() if key not in spec.consumed}
    if name == "Muon":
        return OptimizerPlan(findings.resolved(PATH, name), _muon_groups(kept))
    if name == "Lamb" and given.get("compat") != "deepspeed":
        findings.note(PATH, "trust ratios are of the bias-corrected update, as in the paper (DeepSpeed: uncorrected)")
    name, changed = _adam_decay(name, given, findings)
    findings.resolved(PATH, name)
    params = {**spec.defaults, **changed, **kept}
    for key, value in params.items():
        findings.resolved(f"{PARAMS}.{key}", value)
    return OptimizerPlan(name, params)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_consumed(name: str, key: str, value: Any, honoured: Any, findings: Findings) -> None:
    """A switch of DeepSpeed's: fine where it asks for what is done anyway, a problem where it changes the result."""
    if honoured is None or value == honoured:
        return
    path = f"{PARAMS}.{key}"
    if key in ("bias_correction", "amsgrad"):
        findings.problem(
            path,
            f"{name} is built with {key} {_json(honoured)} only",
            found=value,
            allowed=_json(honoured),
            repair=f"leave {key} out",
            code="value",
        )
    else:
        reason = {
            "set_grad_none": "gradients are always released after a step",
            "fp32_optimizer_states": "moments are always fp32",
            "ns_method": "the standard Newton-Schulz iteration is used",
        }[key]
        findings.note(path, f"no effect: {reason}")


def _adam_decay(name: str, given: Mapping[str, Any], findings: Findings) -> tuple[str, dict[str, Any]]:
    """DeepSpeed's ``Adam`` decays like AdamW unless ``adam_w_mode`` is false; ``torch_adam`` brings torch's default."""
    if name not in ("Adam", "AdamW"):
        return name, {}
    decoupled = name == "AdamW" or given.get("adam_w_mode", True)
    if name == "AdamW" and given.get("adam_w_mode") is False:
        findings.note(f"{PARAMS}.adam_w_mode", "no effect: AdamW always decays weights apart from the gradient")
    if name == "Adam" and decoupled:
        findings.note(
            PATH,
            "Adam is AdamW, as in DeepSpeed: weights decay apart from the gradient; adam_w_mode false gives Adam",
        )
    if not decoupled:
        return "Adam", {}
    if given.get("torch_adam") and "weight_decay" not in given:
        findings.note(
            f"{PARAMS}.torch_adam", f"weight_decay defaults to torch's {DECOUPLED_DECAY_OF_TORCH:g}, not to 0"
        )
        return "AdamW", {"weight_decay": DECOUPLED_DECAY_OF_TORCH}
    return "AdamW", {}


def _muon_groups(given: Mapping[str, Any]) -> dict[str, Any]:
    """``muon`` for matrices, ``adam`` for the rest; ``lr`` is for both unless ``muon_lr`` or ``adam_lr`` is given."""
    muon = dict(MUON_GROUP)
    adam = dict(MUON_ADAM_GROUP)
    for key in ("lr", "weight_decay"):
        if key in given:
            muon[key] = adam[key] = given[key]
    muon.update({key: given[key] for key in (*MUON_GROUP, "ns_coefficients") if key in given})
    adam.update({key: given[key] for key in ("betas", "eps") if key in given})
    muon["lr"] = given.get("muon_lr", muon["lr"])
    adam["lr"] = given.get("adam_lr", adam["lr"])
    return {"muon": muon, "adam": adam}


def _json(value: Any) -> str:
    return "true" if value is True else "false" if value is False else repr(value)
