"""The optimizers a config may name, with their parameters. Data only; no torch, so the signatures are written out.

Sources: https://pytorch.org/docs/stable/optim.html and DeepSpeed's defaults where DeepSpeed has the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class OptimizerSpec:
    """``defaults`` go to the constructor when the user leaves them out; ``options`` only when given.

    ``consumed`` are DeepSpeed's keys that choose between its implementations: key -> the only value that can be
    honoured here. ``refused`` are other keys people write: key -> what to do instead.
    """

    defaults: Mapping[str, Any]
    options: tuple[str, ...] = ()
    consumed: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.defaults, *self.options, *self.consumed)


_TORCH = ("foreach", "maximize", "capturable")
_FUSED = (*_TORCH, "fused")
_FUSED_KEYS = {"set_grad_none": True, "fp32_optimizer_states": True}
_ADAM_KEYS = {"bias_correction": True, "torch_adam": None, "adam_w_mode": None, **_FUSED_KEYS}
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_CLIP = {"max_grad_norm": "use the top-level gradient_clipping, which clips by the global norm"}


def _spec(
    defaults: dict[str, Any], options: tuple[str, ...] = _TORCH, consumed: dict[str, Any] | None = None
) -> OptimizerSpec:
    return OptimizerSpec(MappingProxyType(defaults), options, MappingProxyType(consumed or {}), _CLIP)


OPTIMIZERS: Mapping[str, OptimizerSpec] = MappingProxyType(
    {
        "AdamW": _spec(_ADAM, (*_FUSED, "amsgrad"), _ADAM_KEYS),
        "Adam": _spec(_ADAM, (*_FUSED, "amsgrad"), _ADAM_KEYS),
        "SGD": _spec(
            {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False},
            ("foreach", "maximize", "fused"),
        ),
        "Adagrad": _spec(
            {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
            ("foreach", "maximize", "fused"),
            {"fp32_optimizer_states": True, "amsgrad": False},
        ),
        "RAdam": _spec(_ADAM, (*_TORCH, "decoupled_weight_decay")),
        "NAdam": _spec({**_ADAM, "lr": 2e-3, "momentum_decay": 4e-3}, (*_TORCH, "decoupled_weight_decay")),
        "Adamax": _spec({**_ADAM, "lr": 2e-3}),
        "RMSprop": _spec(
            {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}
        ),
        "Lion": _spec({"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}, (), _FUSED_KEYS),
        "Adafactor": _spec(
            {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0},
            ("foreach", "maximize"),
        ),
        "Lamb": _spec(
            {**_ADAM, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01, "eps_inside_sqrt": False},
            ("compat", "exclude_from_adaptation"),
            {"amsgrad": False, "set_grad_none": True},
        ),
        "Muon": _spec(
            {},
            ("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay")
            + ("nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"),
            {"ns_method": "standard"},
        ),
        "ASGD": _spec({"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0}),
        "Adadelta": _spec({"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0}),
        "Rprop": _spec({"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}),
        "SparseAdam": _spec({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}, ("maximize",)),
    }
)

MUON_GROUP: Mapping[str, Any] = MappingProxyType(
    {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "original"}
)
"""Matrices inside the model (DeepSpeed's defaults). ``original``: the update is scaled by sqrt(max(1, rows / columns))."""

MUON_ADAM_GROUP: Mapping[str, Any] = MappingProxyType(
    {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
)
"""Everything else under Muon: embeddings, the output layer, vectors."""

NOT_BUILT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD")
"""Optimizers that DeepSpeed knows and this engine does not provide."""

UNUSABLE: Mapping[str, str] = MappingProxyType(
    {"LBFGS": "evaluates the model several times inside one step, which engine.step() cannot do"}
)

DECOUPLED_DECAY_OF_TORCH = 1e-2
"""weight_decay of torch.optim.AdamW, which DeepSpeed uses when ``torch_adam`` is true."""
