"""Ranks that take different paths get one message on all ranks where no right weights are possible, never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.collectives.stall import watch
from engine.contracts import EngineError
from tests.harness import launch_script
from tests.parity.small import ADAMW, config_of, regression_batch, seeded
from tests.parity.toy import part

WORLD = 2
LIMIT_SECONDS = 40.0


class Branching(nn.Module):
    """Each block is a shard of its own at stage 3; ``skip`` leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor, skip: int | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = x + block(x).tanh()
        return nn.functional.mse_loss(self.last(x), y)


def made(stage: int, accumulation: int = 1) -> engine.Engine:
    watch.quiet_seconds, watch.interval_seconds = 1.0, 0.2
    config = config_of(stage, accumulation, gradient_clipping=0.0)
    if stage == 3:
        config["zero_optimization"]["prefetch_bucket_size"] = 1
    return engine.initialize(model=seeded(Branching), config=config)[0]


def mine(step: int) -> dict[str, Tensor]:
    return part(regression_batch(step), dist.get_rank(), WORLD)


def message_of(run: Callable[[engine.Engine], None], stage: int, accumulation: int = 1) -> tuple[str, float]:
    model_engine = made(stage, accumulation)
    started = time.monotonic()
    try:
        run(model_engine)
    except EngineError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "nothing was raised", time.monotonic() - started


def skip_a_block_on_one_rank(model_engine: engine.Engine) -> None:
    for step in range(3):
        skip = 1 if step == 1 and dist.get_rank() == 1 else None
        model_engine.backward(model_engine(**mine(step), skip=skip))
        model_engine.step()


def evaluate_one_batch_more(model_engine: engine.Engine) -> None:
    model_engine.eval()
    with torch.no_grad():
        for step in range(3 + dist.get_rank()):
            model_engine(**mine(step))
    model_engine.train()
    for step in range(2):
        model_engine.backward(model_engine(**mine(step)))
        model_engine.step()


def step_once_more(model_engine: engine.Engine) -> None:
    for step in range(2 + dist.get_rank()):
        model_engine.backward(model_engine(**mine(step)))
        model_engine.step()
    if dist.get_rank() == 0:
        model_engine.eval_batch(iter([mine(0)]))


def backward_once_more(model_engine: engine.Engine) -> None:
    for step in range(2):
        for _ in range(1 + (dist.get_rank() == 1 and step == 1)):
            model_engine.backward(model_engine(**mine(step)))
        model_engine.step()


def read_on_one_rank(model_engine: engine.Engine) -> None:
    model_engine.backward(model_engine(**mine(0)))
    if dist.get_rank() == 1:
        model_engine.full_parameter("last.weight")
    model_engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_f4_a_branch_that_one_rank_does_not_take_trains_right_below_stage_3(ranks, stage):
    expected = plain_branches()
    for parameters in ranks(WORLD).run(branch_by_rank, stage):
        for name, tensor in expected.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=0, atol=1e-5)


def branch_by_rank(stage: int) -> dict[str, Tensor]:
    model_engine = made(stage)
    for step in range(3):
        skip = 1 if dist.get_rank() == step % WORLD else None
        model_engine.backward(model_engine(**mine(step), skip=skip))
        model_engine.step()
    return model_engine.full_parameters()


def plain_branches() -> dict[str, Tensor]:
    model = seeded(Branching)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(3):
        for rank in range(WORLD):
            batch = part(regression_batch(step), rank, WORLD)
            (model(**batch, skip=1 if rank == step % WORLD else None) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


SCRIPT = """
import torch, engine
from engine.collectives.stall import watch
watch.quiet_seconds, watch.interval_seconds = 1.0, 0.2
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
model_engine, *_ = engine.initialize(model=torch.nn.Linear(4, 1), config=config)
for step in range(3 if model_engine.global_rank == 0 else 2):
    model_engine.backward(model_engine(torch.ones(2, 4)).mean())
    model_engine.step()
"""


def test_f4_a_rank_that_has_ended_is_named(tmp_path: Path):
    script = tmp_path / "unequal.py"
    script.write_text(SCRIPT)
    finished = launch_script(WORLD, [script], timeout=90)
    assert finished.returncode != 0
    assert "RunFailed: " in finished.stderr
    assert "rank 0 (step 3, " in finished.stderr
    assert "rank 1 has ended (after step 2)" in finished.stderr


@pytest.mark.parametrize(
    ("run", "stage", "words"),
    [
        (skip_a_block_on_one_rank, 3, ["blocks.1", "rank 0", "rank 1", "step 2"]),
        (evaluate_one_batch_more, 3, ["rank 0", "rank 1", "step 1"]),
        (step_once_more, 0, ["rank 0", "rank 1", "the agreement of eval_batch()"]),
        (step_once_more, 1, ["rank 0", "rank 1", "the agreement of eval_batch()", "step 3"]),
        (step_once_more, 3, ["rank 0", "rank 1", "step 3"]),
        (backward_once_more, 2, ["rank 0", "rank 1", "step 2"]),
        (backward_once_more, 3, ["rank 0", "rank 1", "step 2"]),
        (read_on_one_rank, 0, ["rank 1 in full_parameters of last.weight", "rank 0 in step()"]),
        (read_on_one_rank, 2, ["rank 1 in full_parameters of last.weight", "rank 0 in step()"]),
    ],
)
def test_f4_diverging_ranks_end_with_one_message(ranks, run, stage, words):
    by_rank = ranks(WORLD).run(message_of, run, stage, timeout=LIMIT_SECONDS)
    for message, seconds in by_rank:
        for word in words:
            assert word in message, message
        assert seconds < LIMIT_SECONDS / 2
    assert by_rank[0][0] == by_rank[1][0]
