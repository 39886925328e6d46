"""The optimizer a config means: its canonical name and the parameters its constructor gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.plan.findings import nearest
from engine.plan.optimizer_table import (
    DECOUPLED_DECAY_OF_TORCH,
    MUON_ADAM_GROUP,
    MUON_GROUP,
    NOT_BUILT,
    OPTIMIZERS,
    UNUSABLE,
    OptimizerSpec,
)
from engine.plan.plan import OptimizerPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

PATH = "optimizer.type"
PARAMS = "optimizer.params"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def resolve_optimizer(config: Config, findings: Findings) -> OptimizerPlan | None:
    """None when the JSON names no optimizer (the client may bring one) or the name cannot be used."""
    section = config.optimizer
    if section is None:
        return None
    if section.type is None:
        if findings.is_auto(PATH):
            findings.missing(PATH)
        else:
            findings.problem(PATH, "the optimizer section has no type", repair='add "type": "AdamW", for example')
        return None
    given = dict(section.params or {})
    if _DOTTED.fullmatch(section.type):
        findings.resolved(PATH, section.type, "a class of your own; its parameters are checked when it is made")
        return OptimizerPlan(section.type, _without_autos(given, findings))
    name = _canonical_name(section.type, findings)
    if name is None:
        return None
    spec = OPTIMIZERS[name]
    given = _without_autos(given, findings)
    _check_names(name, spec, given, findings)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if name == "Muon":
        return OptimizerPlan(findings.resolved(PATH, name), _muon_groups(given))
    name, changed = _adam_decay(name, given, findings)
    defaults = {**spec.defaults, **changed}
    findings.resolved(PATH, name)
    kept = {key: value for key, value in given.items() if key in spec.defaults or key in spec.options}
    for key, value in defaults.items():
        findings.resolved(f"{PARAMS}.{key}", kept.get(key, value), origin="user" if key in kept else "default")
    return OptimizerPlan(name, {**defaults, **kept})


def _canonical_name(written: str, findings: Findings) -> str | None:
    folded = written.casefold()
    for name in OPTIMIZERS:
        if name.casefold() == folded:
            return name
    for name in NOT_BUILT:
        if name.casefold() == folded:
            findings.problem(PATH, f"the optimizer {name} is valid, but not built here", found=written, code="not-built")
            return None
    for name, reason in UNUSABLE.items():
        if name.casefold() == folded:
            findings.problem(PATH, f"{name} {reason}", found=written)
            return None
    close = nearest(written, OPTIMIZERS)
    findings.problem(
        PATH,
        f"there is no optimizer {written!r}",
        found=written,
        allowed=", ".join(OPTIMIZERS) + ", or the dotted path of a class",
        repair=f"did you mean {close}?" if close else "",
    )
    return None


def _without_autos(given: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """The parameters less those that are "auto", each of which is reported as missing."""
    kept = {}
    for key, value in given.items():
        if value == "auto" or findings.is_auto(f"{PARAMS}.{key}"):
            findings.missing(f"{PARAMS}.{key}")
        else:
            kept[key] = value
    return kept


def _check_names(name: str, spec: OptimizerSpec, given: Mapping[str, Any], findings: Findings) -> None:
    for key, value in given.items():
        path = f"{PARAMS}.{key}"
        if key in spec.refused:
            findings.problem(path, f"{name} does not take {key}", found=value, repair=spec.refused[key])
        elif key not in spec.names:
            close = nearest(key, spec.names)
            findings.problem(
                path,
                f"{name} has no parameter {key!r}",
                found=value,
                allowed=", ".join(spec.names),
                repair=f"did you mean {close}?" if close else "",
            )
        elif key in spec.consumed:
            _check_consumed(name, key, value, spec.consumed[key], findings)


def _check_consumed(name: str, key: str, value: Any, honoured: Any, findings: Findings) -> None:
    """A switch of DeepSpeed's: fine where it asks for what is done anyway, a problem where it changes the result."""
    if honoured is None or value == honoured:
        return
    path = f"{PARAMS}.{key}"
    if key in ("bias_correction", "amsgrad"):
        findings.problem(path, f"{name} is built with {key} {_json(honoured)} only", found=value, allowed=_json(honoured))
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
            PATH, "Adam means AdamW here, as in DeepSpeed: weights decay apart from the gradient; adam_w_mode false is Adam"
        )
    if not decoupled:
        return "Adam", {}
    if given.get("torch_adam") and "weight_decay" not in given:
        findings.note(f"{PARAMS}.torch_adam", f"weight_decay defaults to torch's {DECOUPLED_DECAY_OF_TORCH:g}, not to 0")
        return "AdamW", {"weight_decay": DECOUPLED_DECAY_OF_TORCH}
    return "AdamW", {}


def _muon_groups(given: Mapping[str, Any]) -> dict[str, Any]:
    """``muon`` for matrices and ``adam`` for the rest; ``lr`` is for both unless ``muon_lr`` or ``adam_lr`` is given."""
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
