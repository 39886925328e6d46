"""The optimizers a config may name, with the defaults of their parameters. Data only, as there is no torch here.

Sources: https://pytorch.org/docs/stable/optim.html and DeepSpeed's defaults where DeepSpeed has the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class OptimizerSpec:
    """``defaults`` go to the constructor where the user leaves them out.

    ``consumed`` are keys of DeepSpeed's that never reach it: key -> the value that asks for what is done anyway, None
    where the plan acts on the key itself.
    """

    defaults: Mapping[str, Any]
    consumed: Mapping[str, Any] = field(default_factory=dict)


_FUSED_KEYS = {"set_grad_none": True, "fp32_optimizer_states": True}
_ADAM_KEYS = {"bias_correction": True, "torch_adam": None, "adam_w_mode": None, **_FUSED_KEYS}
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

_ONE_BIT = {
    "bias_correction": False,
    "eps_inside_sqrt": False,
    "compression_unit": "bucket",
    "compression_scale": "rms",
    "compression_of": "update",
    "max_update": 10.0,
}
_ONE_BIT_KEYS = {"amsgrad": False, "cuda_aware": None, "comm_backend_name": None}

OPTIMIZERS: Mapping[str, OptimizerSpec] = MappingProxyType(
    {
        "AdamW": OptimizerSpec(_ADAM, _ADAM_KEYS),
        "Adam": OptimizerSpec(_ADAM, _ADAM_KEYS),
        "SGD": OptimizerSpec({"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False}),
        "Adagrad": OptimizerSpec(
            {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
            {"fp32_optimizer_states": True, "amsgrad": False},
        ),
        "RAdam": OptimizerSpec(_ADAM),
        "NAdam": OptimizerSpec({**_ADAM, "lr": 2e-3, "momentum_decay": 4e-3}),
        "Adamax": OptimizerSpec({**_ADAM, "lr": 2e-3}),
        "RMSprop": OptimizerSpec(
            {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}
        ),
        "Lion": OptimizerSpec({"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}, _FUSED_KEYS),
        "Adafactor": OptimizerSpec(
            {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0}
        ),
        "Lamb": OptimizerSpec(
            {**_ADAM, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01, "eps_inside_sqrt": False},
            {"amsgrad": False, "set_grad_none": True},
        ),
        "Muon": OptimizerSpec({}, {"ns_method": "standard"}),
        "OneBitAdam": OptimizerSpec({**_ADAM, "freeze_step": 100_000, **_ONE_BIT}, _ONE_BIT_KEYS),
        "ZeroOneAdam": OptimizerSpec(
            {
                **_ADAM,
                "var_freeze_step": 100_000,
                "var_update_scaler": 16,
                "local_step_scaler": 32_678,
                "local_step_clipper": 16,
                **_ONE_BIT,
            },
            _ONE_BIT_KEYS,
        ),
        "OneBitLamb": OptimizerSpec(
            {
                **_ADAM,
                "freeze_step": 100_000,
                "max_coeff": 10.0,
                "min_coeff": 0.01,
                "coeff_beta": 0.9,
                "factor_max": 4.0,
                "factor_min": 0.5,
                "factor_threshold": 0.1,
                **_ONE_BIT,
            },
            _ONE_BIT_KEYS,
        ),
        "ASGD": OptimizerSpec({"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0}),
        "Adadelta": OptimizerSpec({"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0}),
        "Rprop": OptimizerSpec({"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}),
    }
)

MUON_GROUP: Mapping[str, Any] = MappingProxyType(
    {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "original"}
)
"""Matrices inside the model; DeepSpeed's defaults. ``original`` scales an update by sqrt(max(1, rows / columns))."""

MUON_ADAM_GROUP: Mapping[str, Any] = MappingProxyType(
    {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
)
"""Everything else under Muon: embeddings, the output layer, vectors."""

UNUSABLE: Mapping[str, str] = MappingProxyType(
    {
        "LBFGS": "evaluates the model several times inside one step, which engine.step() cannot do",
        "SparseAdam": "takes sparse gradients, and those of this engine are dense: use Adam",
    }
)

DECOUPLED_DECAY_OF_TORCH = 1e-2
"""weight_decay of torch.optim.AdamW, which DeepSpeed uses when ``torch_adam`` is true."""
