"""Frozen, tied and unused parameters, and those whose requires_grad changes on the way."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.contracts import EngineError
from tests.parity.runs import assemble, pieces_of
from tests.parity.small import ADAMW, Case, Regression, config_of, gpt, regression_batch, run_steps, seeded, token_batch
from tests.parity.toy import part

WORLD = 2
STAGES = range(4)
BATCH_PARTS = 2


class Blocks(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


CASE = Case(Blocks, zero={"prefetch_bucket_size": 1})
LATE = "blocks.1."


def set_trainable(model: nn.Module, beginning: str, trainable: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(beginning):
            parameter.requires_grad_(trainable)


@functools.cache
def plain_schedule(trainable_by_step: tuple[bool, ...]) -> dict[str, Tensor]:
    """One process in which the late block trains in the steps that say so."""
    model = CASE.model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step, trainable in enumerate(trainable_by_step):
        set_trainable(model, LATE, trainable)
        for index in range(WORLD):
            (model(**part(regression_batch(step), index, WORLD)) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_schedule(stage: int, trainable_by_step: tuple[bool, ...]) -> Any:
    model_engine, *_ = engine.initialize(model=CASE.model(), config=config_of(stage, 1, CASE))
    for step, trainable in enumerate(trainable_by_step):
        set_trainable(model_engine.module, LATE, trainable)
        run_steps(model_engine, regression_batch, 1, first=step)
    outcome = pieces_of(model_engine)
    assert model_engine.optimizer is not None
    model_engine.destroy()
    return outcome


def train_schedules(stage: int) -> list[Any]:
    return [train_schedule(stage, schedule) for schedule in SCHEDULES.values()]


SCHEDULES = {
    "frozen after initialize, unfrozen later": (False, False, True, True),
    "frozen later": (True, True, False, False),
    "frozen for a while": (True, False, False, True),
}


@pytest.mark.parametrize("stage", STAGES)
def test_g3_turning_requires_grad_off_and_on_after_initialize(ranks, stage):
    by_rank = ranks(WORLD).run(train_schedules, stage)
    for index, (name, schedule) in enumerate(SCHEDULES.items()):
        after = assemble([pieces[index] for pieces in by_rank])
        for parameter, expected in plain_schedule(schedule).items():
            difference = (after[parameter] - expected).abs().max().item()
            assert difference < 1e-5, f"{name}: {parameter} is off by {difference:.1e}"


def unfreeze_late(stage: int, on_rank: int | None) -> str:
    model = CASE.model()
    set_trainable(model, LATE, False)
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage, 1, CASE))
    run_steps(model_engine, regression_batch, 2)
    if on_rank is None or model_engine.mesh.rank == on_rank:
        set_trainable(model_engine.module, LATE, True)
    try:
        run_steps(model_engine, regression_batch, 1, first=2)
    except EngineError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("stage", STAGES)
def test_g3_unfreezing_what_initialize_found_frozen_is_refused_by_name(ranks, stage):
    for message in ranks(WORLD).run(unfreeze_late, stage, None):
        assert "step 3" in message
        assert "blocks.1.weight" in message
        assert "while it is trainable" in message


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_g3_unfreezing_on_one_rank_is_refused_on_all(ranks, stage):
    for message in ranks(WORLD).run(unfreeze_late, stage, 1):
        assert "step 3" in message
        assert "frozen when initialize() was called" in message


def add_parameters_late(stage: int) -> str:
    model_engine, *_ = engine.initialize(model=CASE.model(), config=config_of(stage, 1, CASE))
    model_engine.module.adapter = nn.Linear(2, 2)
    try:
        run_steps(model_engine, regression_batch, 1)
    except EngineError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("stage", STAGES)
def test_g3_parameters_added_after_initialize_are_refused_by_name(ranks, stage):
    for message in ranks(WORLD).run(add_parameters_late, stage):
        assert "adapter.weight" in message
        assert "build the whole model first" in message


# --- few of many train ---------------------------------------------------------------------------------------


class Adapted(Regression):
    """A frozen layer with a low-rank detour that trains, three times, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LowRank() for _ in range(3))
        self.last = nn.Linear(8, 4)
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def predict(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapter_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if ".down" in n], "lr": 1e-2},
        {"params": [p for n, p in named if ".up" in n or n == "nothing"], "weight_decay": 0.0},
    ]


ADAPTED = Case(
    Adapted,
    frozen=("last.", *(f"blocks.{index}.base" for index in range(3))),
    groups=adapter_groups,
    zero={"prefetch_bucket_size": 1},
)


@functools.cache
def plain_adapted() -> dict[str, Tensor]:
    model = ADAPTED.model()
    optimizer = torch.optim.AdamW(adapter_groups(model), **ADAMW)
    for step in range(3):
        for index in range(WORLD):
            (model(**part(regression_batch(step), index, WORLD)) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_adapted(stage: int) -> tuple[dict[str, Tensor], int, list[str]]:
    model = ADAPTED.model()
    config = config_of(stage, 1, ADAPTED)
    model_engine, optimizer, *_ = engine.initialize(model=model, config=config, model_parameters=adapter_groups(model))
    run_steps(model_engine, regression_batch, 3)
    states = optimizer.named_state().values()
    num_bytes = sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor) and v.dim())
    return model_engine.full_parameters(), num_bytes, sorted(optimizer.named_state())


@pytest.mark.parametrize("stage", STAGES)
def test_g4_frozen_parameters_cost_no_optimizer_state_and_adapters_train_right(ranks, stage):
    by_rank = ranks(WORLD).run(train_adapted, stage)
    expected = plain_adapted()
    numel = sum(p.numel() for n, p in expected.items() if ".down" in n or ".up" in n)
    for parameters, _, names in by_rank:
        for name, tensor in expected.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=0, atol=1e-5)
        assert not [name for name in names if "base" in name or "last" in name]
    total = sum(num_bytes for _, num_bytes, _ in by_rank)
    assert total == 2 * 4 * numel * (WORLD if stage == 0 else 1)


# --- tied weights of a vocabulary that does not divide -------------------------------------------------------


def train_tied(stage: int, folder: str) -> tuple[Any, Any, bool]:
    """Three steps, a save, two more; then the two again from the save, in an engine made anew."""
    case = Case(gpt, token_batch, zero={"prefetch_bucket_size": 1})
    model_engine, *_ = engine.initialize(model=case.model(), config=config_of(stage, 1, case))
    run_steps(model_engine, token_batch, 3)
    model_engine.save_checkpoint(folder)
    run_steps(model_engine, token_batch, 2, first=3)
    straight = pieces_of(model_engine)
    again, *_ = engine.initialize(model=seeded(gpt), config=config_of(stage, 1, case))
    again.load_checkpoint(folder)
    run_steps(again, token_batch, 2, first=3)
    tied = again.module.head.weight is again.module.token_embedding.weight
    return straight, pieces_of(again), tied


@functools.cache
def plain_tied() -> dict[str, Tensor]:
    model = seeded(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(5):
        for index in range(WORLD):
            (model(**part(token_batch(step), index, WORLD)) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_g6_g9_tied_weights_of_an_uneven_vocabulary_train_whole_and_resume(ranks, stage, tmp_path: Path):
    by_rank = ranks(WORLD).run(train_tied, stage, str(tmp_path))
    straight, resumed = (assemble([rank[which] for rank in by_rank]) for which in (0, 1))
    before = dict(seeded(gpt).named_parameters())["token_embedding.weight"]
    assert before.shape[0] % WORLD == 1
    assert ((straight["token_embedding.weight"] - before).abs().amax(dim=1) > 0).all()
    for name, expected in plain_tied().items():
        torch.testing.assert_close(straight[name], expected, rtol=0, atol=1e-5)
        assert torch.equal(straight[name], resumed[name]), name
    assert all(tied for *_, tied in by_rank)


# --- frozen weights survive ----------------------------------------------------------------------------------


def resume_frozen(stage: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def build(seed: int) -> engine.Engine:
        torch.manual_seed(seed)
        model = Blocks()
        set_trainable(model, LATE, False)
        return engine.initialize(model=model, config=config_of(stage, 1, CASE))[0]

    first = build(seed=1)
    run_steps(first, regression_batch, 1)
    first.save_checkpoint(folder)
    second = build(seed=2)
    second.load_checkpoint(folder)
    return first.full_parameters(), second.full_parameters()


@pytest.mark.parametrize("stage", STAGES)
def test_g2_frozen_weights_come_back_from_a_checkpoint(ranks, stage, tmp_path: Path):
    for saved, loaded in ranks(WORLD).run(resume_frozen, stage, str(tmp_path)):
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name
