"""The runs that tests/bench/learning.py compares; what else was tried: docs/benchmarks/learning_tried.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = {"vocabulary_size": 256, "num_blocks": 8, "width": 96, "num_heads": 4, "sequence_length": 128}


@dataclass(frozen=True)
class Row:
    """One way to train. ``max_time``: the bar on wall time against the plain run; None: no such comparison.

    ``max_seeds``: it is trained on so many seeds at most.
    """

    name: str
    num_steps: int
    lr: float = 4e-3
    global_batch: int = 16
    changes: Mapping[str, Any] = field(default_factory=dict)
    max_time: float | None = None
    max_seeds: int = 1_000

    def run(self, seed: int, num_turns: int = 0) -> dict[str, Any]:
        """What the ranks need to know."""
        warmup = {"total_num_steps": self.num_steps, "warmup_num_steps": self.num_steps // 12}
        return {
            "num_steps": self.num_steps,
            "num_turns": num_turns,
            "eval_interval": max(1, self.num_steps // 12),
            "num_curve_samples": 64,
            "num_final_samples": 1024,
            "model": MODEL,
            "config": {
                "train_batch_size": self.global_batch,
                "seed": seed,
                "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {**warmup, "warmup_type": "linear", "cos_min_ratio": 0.05},
                },
                "gradient_clipping": 1.0,
                "steps_per_print": 1_000_000,
                **self.changes,
            },
        }


def curriculum(minimum: int, num_steps: int) -> dict[str, Any]:
    return {
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": minimum,
            "max_difficulty": MODEL["sequence_length"],
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": num_steps, "difficulty_step": 8},
        }
    }


def random_ltd(minimum: int, num_steps: int) -> dict[str, Any]:
    schedule = {
        "min_value": minimum,
        "max_value": MODEL["sequence_length"],
        "schedule_config": {"require_steps": num_steps, "seq_per_step": 8},
    }
    return {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True, "random_ltd_schedule": schedule}}}}


def layer_drop(theta: float, gamma: float) -> dict[str, Any]:
    return {"progressive_layer_drop": {"enabled": True, "theta": theta, "gamma": gamma}}


ROWS = (
    Row("plain", 360),
    Row("curriculum", 385, lr=2e-3, changes=curriculum(8, 385), max_time=0.60),
    Row("random-LTD", 340, lr=3e-3, changes=random_ltd(32, 340), max_time=0.75),
    Row("layer drop", 328, changes=layer_drop(0.5, 0.008), max_time=0.80),
)
"""The first is what the others are compared with."""

LESS = (
    Row("plain, 0.60 of the steps", 216, max_seeds=1),
    Row("plain, 0.75 of the steps", 270, max_seeds=1),
    Row("plain, 0.80 of the steps", 288, max_seeds=1),
)
"""What as much time gives without any of it: one seed shows it."""

LARGE = (
    Row("plain, 4 x batch, 4 x rate", 48, lr=1.6e-2, global_batch=64),
    Row("curriculum, 4 x batch, 4 x rate", 48, lr=1.6e-2, global_batch=64, changes=curriculum(16, 40)),
    Row("plain, 4 x batch, 8 x rate", 48, lr=3.2e-2, global_batch=64),
    Row("curriculum, 4 x batch, 8 x rate", 48, lr=3.2e-2, global_batch=64, changes=curriculum(16, 40)),
)
"""Pairs: a run that may be unstable, and its twin that should not be. Batch and rate: multiples of the plain run's."""
