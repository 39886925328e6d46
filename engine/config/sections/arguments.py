"""Which arguments the optimizers and schedules take, and of which kind.

The tables hold DeepSpeed's own types and torch's, so that a misspelled argument is found without importing torch. A
type that is not in them is a dotted path ("package.module.Class"); its arguments are the user's affair.
"""

from typing import Any

_TORCH = "foreach maximize capturable differentiable fused"
_ADAM = f"lr betas eps weight_decay bias_correction amsgrad {_TORCH}"
_FUSED_ADAM = f"{_ADAM} set_grad_none torch_adam adam_w_mode fp32_optimizer_states"
_LAMB = "lr betas eps weight_decay bias_correction eps_inside_sqrt amsgrad max_coeff min_coeff set_grad_none"
_OWN_LAMB = f"{_LAMB} compat exclude_from_adaptation"
_ONE_BIT = "cuda_aware comm_backend_name compat compression_unit compression_scale compression_of max_update"
_ONE_BIT_ADAM = f"lr betas eps weight_decay bias_correction amsgrad eps_inside_sqrt {_ONE_BIT}"

OPTIMIZER_PARAMS: dict[str, tuple[str, ...]] = {
    name: tuple(dict.fromkeys(arguments.split()))
    for name, arguments in {
        "Adam": _FUSED_ADAM,
        "AdamW": _FUSED_ADAM,
        "Adagrad": f"lr lr_decay weight_decay initial_accumulator_value eps amsgrad fp32_optimizer_states {_TORCH}",
        "Lamb": _OWN_LAMB,
        "Lion": "lr betas weight_decay set_grad_none fp32_optimizer_states",
        "Muon": "lr muon_lr adam_lr momentum weight_decay ns_method nesterov ns_steps ns_coefficients betas eps "
        "adjust_lr_fn",
        "OneBitAdam": f"freeze_step {_ONE_BIT_ADAM}",
        "ZeroOneAdam": f"var_freeze_step var_update_scaler local_step_scaler local_step_clipper {_ONE_BIT_ADAM}",
        "OneBitLamb": "freeze_step max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold "
        f"{_ONE_BIT_ADAM}",
        "SGD": f"lr momentum dampening weight_decay nesterov {_TORCH}",
        "ASGD": f"lr lambd alpha t0 weight_decay {_TORCH}",
        "Adadelta": f"lr rho eps weight_decay {_TORCH}",
        "Adafactor": "lr beta2_decay eps d weight_decay foreach maximize",
        "Adamax": f"lr betas eps weight_decay {_TORCH}",
        "NAdam": f"lr betas eps weight_decay momentum_decay decoupled_weight_decay {_TORCH}",
        "RAdam": f"lr betas eps weight_decay decoupled_weight_decay {_TORCH}",
        "RMSprop": f"lr alpha eps weight_decay momentum centered {_TORCH}",
        "Rprop": f"lr etas step_sizes {_TORCH}",
        "LBFGS": "lr max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn",
        "SparseAdam": "lr betas eps maximize",
        "MuAdam": _ADAM,
        "MuAdamW": _ADAM,
        "MuSGD": "lr momentum dampening weight_decay nesterov",
    }.items()
}

SCHEDULER_PARAMS: dict[str, tuple[str, ...]] = {
    name: (*arguments.split(), "last_batch_iteration")
    for name, arguments in {
        "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
        "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
        "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
        "decay_mom_rate compat",
        "WarmupLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
        "WarmupDecayLR": "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
        "WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
    }.items()
}

TORCH_SCHEDULERS: tuple[str, ...] = (
    "LambdaLR",
    "MultiplicativeLR",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "SequentialLR",
    "CosineAnnealingLR",
    "ChainedScheduler",
    "ReduceLROnPlateau",
    "CyclicLR",
    "CosineAnnealingWarmRestarts",
    "OneCycleLR",
    "PolynomialLR",
)

NUMBERS = frozenset(
    [
        "lr",
        "eps",
        "weight_decay",
        "momentum",
        "dampening",
        "muon_lr",
        "adam_lr",
        "max_coeff",
        "min_coeff",
        "coeff_beta",
        "max_update",
        "factor_max",
        "factor_min",
        "factor_threshold",
        "rho",
        "alpha",
        "lambd",
        "momentum_decay",
        "warmup_min_lr",
        "warmup_max_lr",
        "warmup_min_ratio",
        "cos_min_ratio",
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "decay_mom_rate",
        "cycle_min_mom",
        "cycle_max_mom",
        "lr_range_test_min_lr",
        "lr_range_test_step_rate",
    ]
)
INTEGERS = frozenset(
    [
        "warmup_num_steps",
        "total_num_steps",
        "last_batch_iteration",
        "freeze_step",
        "var_freeze_step",
        "var_update_scaler",
        "local_step_scaler",
        "local_step_clipper",
        "ns_steps",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "lr_range_test_step_size",
        "T_max",
        "last_epoch",
    ]
)
BOOLEANS = frozenset(
    [
        "bias_correction",
        "amsgrad",
        "torch_adam",
        "adam_w_mode",
        "nesterov",
        "set_grad_none",
        "fp32_optimizer_states",
        "eps_inside_sqrt",
        "cuda_aware",
        "cycle_momentum",
        "lr_range_test_staircase",
        "centered",
        "maximize",
        "capturable",
        "differentiable",
        "decoupled_weight_decay",
    ]
)
PAIRS = frozenset({"betas", "etas", "step_sizes"})
NOT_NEGATIVE = frozenset({"lr", "weight_decay", "warmup_num_steps", "total_num_steps", "freeze_step"})


def argument_type(key: str) -> Any:
    """The annotation of an argument that is the same wherever it occurs, None where it is not known.

    Adafactor's eps is a pair, and bounds may be lists with one number per parameter group.
    """
    if key in NUMBERS:
        return float | list[float | None] | None
    if key in INTEGERS:
        return int | None
    if key in BOOLEANS:
        return bool | None
    return list[float] if key in PAIRS else None
