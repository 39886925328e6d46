"""How the plan tests make plans: from plain dictionaries, for worlds of any size, on no device at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.config import load_config
from engine.config.messages import ConfigError, Problem
from engine.plan import ModelFacts, Plan, World, plan

BATCH = {"train_micro_batch_size_per_gpu": 2}

MakePlan = Callable[..., Plan]
ProblemsOf = Callable[..., tuple[Problem, ...]]


def _plan(settings: dict[str, Any], size: int = 1, facts: ModelFacts | None = None, **world: Any) -> Plan:
    world.setdefault("local_size", size)
    return plan(load_config({**BATCH, **settings}), World(size=size, **world), facts)


@pytest.fixture
def make_plan() -> MakePlan:
    """``make_plan(settings, size)``: the plan of settings beside a micro-batch of 2."""
    return _plan


@pytest.fixture
def problems_of() -> ProblemsOf:
    """``problems_of(settings, size)``: the problems that the plan, not the reader, finds."""

    def problems(settings: dict[str, Any], size: int = 1, **world: Any) -> tuple[Problem, ...]:
        config = load_config({**BATCH, **settings})
        with pytest.raises(ConfigError) as caught:
            plan(config, World(size=size, **{"local_size": size, **world}))
        return caught.value.problems

    return problems


def messages(made: Plan, path: str) -> list[str]:
    """The notes of a plan at ``path``."""
    return [note.message for note in made.notes if note.path == path]
