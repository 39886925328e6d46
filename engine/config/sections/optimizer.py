"""``optimizer`` and ``scheduler``, and which arguments each type takes.

The tables hold DeepSpeed's own types and torch's, so that a misspelled argument is found without importing torch. A
type
that is not in them must be a dotted path ("package.module.Class"); its arguments are the user's affair.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from engine.config.sections.base import Fault, Section

_TORCH = ("foreach", "maximize", "capturable", "differentiable", "fused")
_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "set_grad_none", "torch_adam",
    "adam_w_mode",
         "fp32_optimizer_states", *_TORCH)  # fmt: skip
_LAMB = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "eps_inside_sqrt",
    "amsgrad",
    "max_coeff",
    "min_coeff",
)
_ONE_BIT = ("freeze_step", "cuda_aware", "comm_backend_name", "eps_inside_sqrt")

OPTIMIZER_PARAMS: dict[str, tuple[str, ...]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "amsgrad",
        "fp32_optimizer_states", *_TORCH),
    "Lamb": _LAMB,
    "Lion": ("lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"),
    "Muon": ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "ns_method", "nesterov", "ns_steps",
        "ns_coefficients",
             "betas", "eps", "adjust_lr_fn"),
    "OneBitAdam": ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", *_ONE_BIT),
    "ZeroOneAdam": ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "var_freeze_step",
        "var_update_scaler",
                    "local_step_scaler", "local_step_clipper", "cuda_aware", "comm_backend_name", "eps_inside_sqrt"),
    "OneBitLamb": (*_LAMB, "freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min",
                   "factor_threshold"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", *_TORCH),
    "ASGD": ("lr", "lambd", "alpha", "t0", "weight_decay", *_TORCH),
    "Adadelta": ("lr", "rho", "eps", "weight_decay", *_TORCH),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adamax": ("lr", "betas", "eps", "weight_decay", *_TORCH),
    "NAdam": ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", *_TORCH),
    "RAdam": ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", *_TORCH),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", *_TORCH),
    "Rprop": ("lr", "etas", "step_sizes", *_TORCH),
    "LBFGS": ("lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),
    "SparseAdam": ("lr", "betas", "eps", "maximize"),
    "MuAdam": _ADAM,
    "MuAdamW": _ADAM,
    "MuSGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}  # fmt: skip

SCHEDULER_PARAMS: dict[str, tuple[str, ...]] = {
    "LRRangeTest": ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
        "lr_range_test_staircase"),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
                 "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum",
                 "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"),
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
}  # fmt: skip

TORCH_SCHEDULERS: tuple[str, ...] = (
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "SequentialLR",
    "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR", "CosineAnnealingWarmRestarts",
    "OneCycleLR",
    "PolynomialLR",
)  # fmt: skip

_NUMBERS = frozenset({
    "lr", "eps", "weight_decay", "momentum", "dampening", "muon_lr", "adam_lr", "max_coeff", "min_coeff", "coeff_beta",
    "factor_max", "factor_min", "factor_threshold", "rho", "alpha", "lambd", "momentum_decay", "warmup_min_lr",
    "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate",
    "decay_mom_rate",
    "cycle_min_mom", "cycle_max_mom", "lr_range_test_min_lr", "lr_range_test_step_rate",
})  # fmt: skip
_INTEGERS = frozenset({
    "warmup_num_steps", "total_num_steps", "last_batch_iteration", "freeze_step", "var_freeze_step",
    "var_update_scaler",
    "local_step_scaler", "local_step_clipper", "ns_steps", "cycle_first_step_size", "cycle_second_step_size",
    "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "lr_range_test_step_size", "T_max",
    "last_epoch",
})  # fmt: skip
_BOOLEANS = frozenset({
    "bias_correction", "amsgrad", "torch_adam", "adam_w_mode", "nesterov", "set_grad_none", "fp32_optimizer_states",
    "eps_inside_sqrt", "cuda_aware", "cycle_momentum", "lr_range_test_staircase", "centered", "maximize", "capturable",
    "differentiable", "decoupled_weight_decay",
})  # fmt: skip


def params_type(key: str) -> Any:
    """The annotation of a constructor argument that is the same wherever it occurs, else None."""
    if key in _NUMBERS:
        return float | list[float] | None
    if key in _INTEGERS:
        return int | None
    return bool | None if key in _BOOLEANS else None


def _params_faults(params: dict[str, Any]) -> Iterator[Fault]:
    for key, value in params.items():
        kind, allowed = None, ""
        if key in _BOOLEANS:
            kind, allowed = isinstance(value, bool | None), "true or false"
        elif key in _INTEGERS:
            kind, allowed = value is None or (isinstance(value, int) and not isinstance(value, bool)), "an integer"
        elif key in _NUMBERS:
            values = value if isinstance(value, list) else [value]
            kind = all(
                item is None or (isinstance(item, int | float) and not isinstance(item, bool)) for item in values
            )
            allowed = "a number"
        elif key in ("betas", "etas", "step_sizes"):
            pair = isinstance(value, list) and len(value) == 2
            kind = pair and all(isinstance(item, int | float) and not isinstance(item, bool) for item in value)
            allowed = "a list of two numbers"
        if kind is False:
            yield Fault(f"params.{key}", "has the wrong type", allowed)
    betas = params.get("betas")
    if isinstance(betas, list) and all(isinstance(beta, int | float) for beta in betas):
        for beta in betas:
            if not 0 <= beta < 1:
                yield Fault("params.betas", f"{beta} is out of range", "numbers from 0 up to but not including 1")
    for key in ("lr", "eps", "weight_decay"):
        value = params.get(key)
        if isinstance(value, int | float) and value < 0:
            yield Fault(f"params.{key}", f"{value} is negative", "a number >= 0")


class OptimizerSection(Section):
    """Which optimizer, and its constructor's arguments."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "type"

    type: str | None = Field(
        None,
        description='A name of torch.optim, "Lamb", "OneBitAdam", ..., or a dotted path to a class. Adam is AdamW.',
    )
    params: dict[str, Any] = Field({}, description="The constructor's arguments.")
    legacy_fusion: bool = Field(False, description="An old fused step of DeepSpeed's; no effect here.")

    def faults(self) -> Iterator[Fault]:
        if not self.type:
            yield Fault("type", "is missing: without it there is no optimizer", "a name such as AdamW", 'add "type"')
        yield from _params_faults(self.params)


class SchedulerSection(Section):
    """Which learning-rate schedule, and its arguments."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "type"

    type: str | None = Field(
        None,
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle, or a torch scheduler.",
    )
    params: dict[str, Any] = Field({}, description="The schedule's arguments.")

    def faults(self) -> Iterator[Fault]:
        if not self.type:
            yield Fault("type", "is missing: without it there is no schedule", "a name such as WarmupLR", 'add "type"')
        yield from _params_faults(self.params)
        warmup_type = self.params.get("warmup_type")
        if warmup_type is not None and warmup_type not in ("log", "linear"):
            yield Fault(
                "params.warmup_type",
                f'"{warmup_type}" is unknown (DeepSpeed takes "log")',
                '"log" or "linear"',
            )
        for key in ("warmup_num_steps", "total_num_steps"):
            value = self.params.get(key)
            if isinstance(value, int) and value < 0:
                yield Fault(f"params.{key}", f"{value} is negative", "an integer >= 0")
