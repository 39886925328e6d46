"""One case of the list of traps (test_trap_list.py), and short forms of what is written in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INVALID, VALID, NEEDS, LACKS = "invalid", "valid", "needs-values", "not-built"


@dataclass(frozen=True)
class Case:
    """``path``: of the problem, note, needed value or feature that must be told; ``words``: in what is said there."""

    tree: dict[str, Any]
    kind: str
    path: str = ""
    words: str = ""
    size: int | None = None
    more: dict[str, Any] = field(default_factory=lambda: {"train_micro_batch_size_per_gpu": 1})


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": params}}


def schedule(name: str, **params: Any) -> dict[str, Any]:
    return {**adam(), "scheduler": {"type": name, "params": params}}


LTD_SCHEDULE = {"min_value": 8, "max_value": 32, "schedule_config": {"require_steps": 4, "seq_per_step": 8}}
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}
DISCRETE = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [32, 64, 128], "max_step": [10, 20]}}
