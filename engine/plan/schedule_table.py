"""The learning-rate schedules a config may name, with their parameters. Data only; no torch.

Sources: DeepSpeed's schedules and https://pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class ScheduleSpec:
    """``required`` have no default; ``defaults`` are filled in; ``options`` are passed on only when given (the names of
    torch's, which the config does not check).

    ``lengths`` name the parameters that mean the whole run: they may come from ``training.steps``.
    """

    required: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.required, *self.defaults, *self.options)


_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}

OURS: Mapping[str, ScheduleSpec] = MappingProxyType(
    {
        "WarmupLR": ScheduleSpec((), {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP}),
        "WarmupDecayLR": ScheduleSpec(
            ("total_num_steps",),
            {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, **_WARMUP},
            ("total_num_tokens",),
            lengths=("total_num_steps",),
        ),
        "WarmupCosineLR": ScheduleSpec(
            ("total_num_steps",),
            {"warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4, **_WARMUP},
            ("total_num_tokens",),
            lengths=("total_num_steps",),
        ),
        "LRRangeTest": ScheduleSpec(
            (),
            {
                "lr_range_test_min_lr": 1e-3,
                "lr_range_test_step_size": 2000,
                "lr_range_test_step_rate": 1.0,
                "lr_range_test_staircase": False,
                "lr_range_test_growth": "linear",
            },
        ),
        "OneCycle": ScheduleSpec(
            ("cycle_min_lr", "cycle_max_lr"),
            {
                "decay_lr_rate": 0.0,
                "cycle_first_step_size": 2000,
                "cycle_second_step_size": None,
                "cycle_first_stair_count": 0,
                "cycle_second_stair_count": None,
                "decay_step_size": 0,
                "cycle_momentum": True,
                "cycle_min_mom": 0.8,
                "cycle_max_mom": 0.9,
                "decay_mom_rate": 0.0,
            },
        ),
    }
)
"""DeepSpeed's schedules with DeepSpeed's defaults."""

_LAST = ("last_epoch",)
_SHAPE = ("pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase")
_MOMENTUM = ("cycle_momentum", "base_momentum", "max_momentum")

TORCH: Mapping[str, ScheduleSpec] = MappingProxyType(
    {
        "StepLR": ScheduleSpec(("step_size",), {}, ("gamma", *_LAST)),
        "MultiStepLR": ScheduleSpec(("milestones",), {}, ("gamma", *_LAST)),
        "ConstantLR": ScheduleSpec((), {}, ("factor", "total_iters", *_LAST)),
        "LinearLR": ScheduleSpec((), {}, ("start_factor", "end_factor", "total_iters", *_LAST), ("total_iters",)),
        "ExponentialLR": ScheduleSpec(("gamma",), {}, _LAST),
        "PolynomialLR": ScheduleSpec((), {}, ("total_iters", "power", *_LAST), ("total_iters",)),
        "CosineAnnealingLR": ScheduleSpec(("T_max",), {}, ("eta_min", *_LAST), ("T_max",)),
        "CosineAnnealingWarmRestarts": ScheduleSpec(("T_0",), {}, ("T_mult", "eta_min", *_LAST)),
        "CyclicLR": ScheduleSpec(
            ("base_lr", "max_lr"),
            {},
            ("step_size_up", "step_size_down", "mode", "gamma", "scale_mode", *_MOMENTUM, *_LAST),
        ),
        "OneCycleLR": ScheduleSpec(
            ("max_lr",),
            {},
            ("total_steps", "epochs", "steps_per_epoch", *_SHAPE, *_MOMENTUM, *_LAST),
            ("total_steps",),
        ),
    }
)

UNUSABLE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("LambdaLR", "MultiplicativeLR"), "takes a Python function"),
        **dict.fromkeys(("ChainedScheduler", "SequentialLR"), "takes other schedulers"),
        "ReduceLROnPlateau": "takes a metric at every step",
    }
)
"""torch schedules that JSON cannot express."""
