"""The 77 places where DeepSpeed 0.19 lets a mistake through, answers it badly, or surprises: each by its number.

A number has cases (what is written, the verdict, and words of what is said at which path) or a test of its own, where
the trap is not in a config. Features that are not built yet are told as such; once one is built, its cases are valid.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, EngineError, examine, load_config
from engine.config.built import NOT_BUILT
from engine.plan import World, plan, verdict
from tests.unit.config.conftest import Write
from tests.unit.config.trap_case import LACKS, VALID
from tests.unit.config.trap_keys import KEYS
from tests.unit.config.trap_values import VALUES

NUM_TRAPS = 77
TRAPS = {**KEYS, **VALUES}

Check = Callable[[Write, pytest.LogCaptureFixture], None]
CHECKS: dict[int, Check] = {}


def trap(number: int) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[number] = check
        return check

    return register


@trap(12)
def _client_objects_win_aloud(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    import engine

    model = torch.nn.Linear(2, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made, *_ = engine.initialize(
        model=model,
        config=config,
        optimizer=optimizer,
        lr_scheduler=lambda used: torch.optim.lr_scheduler.ConstantLR(used, factor=1.0),
    )
    made.destroy()
    assert "optimizer= was passed, so the section optimizer of the config has no effect" in caplog.text
    assert "lr_scheduler= was passed, so the section scheduler of the config has no effect" in caplog.text


@trap(13)
def _schedule_without_optimizer(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    judged = verdict(load_config({"train_batch_size": 1, "scheduler": {"type": "WarmupLR"}}))
    assert any("the optimizer that is passed to initialize()" in note.message for note in judged.notes)


@trap(72)
def _failures_are_no_assertions(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """Under ``python -O`` as well, and as the error of the public interface."""
    assert issubclass(ConfigError, EngineError)
    assert not issubclass(ConfigError, AssertionError)
    code = "from engine.config import *; from engine.plan import *\n"
    code += "try: plan(load_config({'train_batch_size': 3}), World(2))\nexcept EngineError: print('refused')"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr


@trap(73)
def _every_error_has_path_and_line(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write('{"train_batch_size": 1,\n"flops_profiler": {"top_modules": 0},\n"timers": {"x": 1}}')
    told = [(problem.path, problem.line) for problem in verdict(examine(path)).problems]
    assert told == [("flops_profiler.top_modules", 2), ("timers.x", 3)]


@trap(74)
def _a_missing_file_is_called_missing(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(str(Path(write("{}")).with_name("other.json")))


@trap(75)
def _the_world_is_never_guessed(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3})
    with pytest.raises(ConfigError, match="world size 2"):
        plan(config, World(2))


@trap(76)
def _a_dict_is_never_changed(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    tree: dict[str, Any] = {
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "optimizer": {"type": "adam", "params": {"lr": "1e-3"}},
        "elasticity": {"enabled": True},
        "cpu_offload": True,
    }
    before = repr(tree)
    examine(tree)
    assert repr(tree) == before


@trap(77)
def _duplicate_keys_are_caught(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    (problem,) = verdict(examine(write('{"train_batch_size": 1,\n"seed": 1,\n"seed": 2}'))).problems
    assert "on lines 2 and 3" in problem.message


def test_every_trap_has_a_test() -> None:
    assert not TRAPS.keys() & CHECKS.keys()
    assert sorted(TRAPS.keys() | CHECKS.keys()) == list(range(1, NUM_TRAPS + 1))


@pytest.mark.parametrize("number", sorted(CHECKS))
def test_a_trap_outside_the_config(number: int, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    CHECKS[number](write, caplog)


@pytest.mark.parametrize("number", sorted(TRAPS))
def test_a_trap_in_the_config(number: int) -> None:
    for case in TRAPS[number]:
        world = None if case.size is None else World(case.size, case.size)
        judged = verdict(examine({**case.more, **case.tree}), world)
        kind = VALID if case.kind == LACKS and not judged.not_built else case.kind
        assert judged.kind == kind, (case.tree, judged.render())
        said: dict[str, str] = {}
        for note in judged.notes:
            said[note.path] = f"{said.get(note.path, '')} {note.message}"
        for problem in judged.problems:
            said[problem.path] = f"{said.get(problem.path, '')} {problem.render()}"
        for path in (*judged.needs_values, *judged.not_built):
            said.setdefault(path, "")
        if case.path and (case.words or case.kind != LACKS or case.path in NOT_BUILT):
            assert case.path in said, (case.tree, judged.render())
            assert case.words in said[case.path], (case.tree, judged.render())
