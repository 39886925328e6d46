"""Models without a list of blocks under a pipeline: cut between their children, whose outputs differ in shape."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import engine
from engine.config import load_config
from engine.model.describe import describe_model
from engine.model.pipeline.layers import find_layers
from engine.plan import World, plan
from engine.plan.stages import stages_of
from tests.parity.pipeline_models import BATCH, config_of
from tests.parity.small import seeded
from tests.parity.toy import part

CLASSES, STEPS = 5, 3


class Pictures(nn.Module):
    """Not registered in the order of its calls; a module without parameters is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, CLASSES)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6))
        self.wide = nn.Linear(6 * 2 * 2, 24)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.first(pictures)))
        x = self.pool(torch.relu(self.second(x)))
        return F.cross_entropy(self.head(torch.tanh(self.wide(x.flatten(1)))), labels)


class Around(nn.Module):
    """All parameters are in one child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pictures()
        self.dropout = nn.Dropout(0.0)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        return self.inner(self.dropout(pictures), labels)


class Twice(Pictures):
    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(self.pool(torch.relu(self.first(pictures)))).mean(1, keepdim=True).expand(-1, 6, -1, -1)
        return F.cross_entropy(self.head(self.wide(x.flatten(1)) + self.wide(-x.flatten(1))), labels)


class Skip(Pictures):
    """The last child reads what the first returned."""

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        first = self.first(pictures)
        x = self.pool(self.pool(self.second(torch.relu(first))))
        x = torch.tanh(self.wide(x.flatten(1))) + first.mean((1, 2, 3)).unsqueeze(1)
        return F.cross_entropy(self.head(x), labels)


class Watched(Pictures):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.wide.lock = threading.Lock()


MODELS: dict[str, type[nn.Module]] = {
    "plain": Pictures,
    "around": Around,
    "twice": Twice,
    "skip": Skip,
    "watched": Watched,
}


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(STEPS * BATCH, 3, 8, 8, generator=generator)
    labels = torch.randint(CLASSES, (STEPS * BATCH,), generator=generator)
    return [{"pictures": one, "labels": label} for one, label in zip(pictures, labels, strict=True)]


def evaluation_batches(accumulation: int, mesh: Any) -> list[dict[str, Tensor]]:
    whole = default_collate(samples()[:BATCH])
    places = [micro * mesh.dp_size + mesh.dp_rank for micro in range(accumulation)]
    return [part(whole, place, accumulation * mesh.dp_size) for place in places]


def train(name: str, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    config = config_of(accumulation, **more)
    model_engine, _, loader, _ = engine.initialize(model=seeded(MODELS[name]), config=config, training_data=samples())
    assert loader is not None
    batches = iter(loader)
    losses = [model_engine.train_batch(batches).item() for _ in range(STEPS)]
    evaluated = model_engine.eval_batch(iter(evaluation_batches(accumulation, model_engine.mesh))).item()
    seen = {
        "losses": losses,
        "evaluated": evaluated,
        "names": sorted(n for n, _ in model_engine.module.named_parameters()),
        "whole": {n: p.clone() for n, p in model_engine.full_parameters().items()},
    }
    model_engine.destroy()
    return seen


def message(name: str, **more: Any) -> str:
    with pytest.raises(engine.EngineError) as raised:
        train(name, **more)
    return str(raised.value)


TWO = {"pipeline": {"stages": 2}}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "two stages": (2, "plain", TWO),
    "four stages, in the order of calls": (4, "plain", {"pipeline": {"stages": 4, "partition": "uniform"}}),
    "a child holds all": (2, "around", TWO),
    "split backward, stage 1": (2, "plain", {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}),
    "two stages of two ranks, ZeRO 3": (4, "plain", TWO | {"zero_optimization": {"stage": 3}}),
    "down and back, ZeRO 2": (
        2,
        "plain",
        {"pipeline": {"stages": 2, "schedule": "zbv"}, "zero_optimization": {"stage": 2}},
    ),
    "bf16": (2, "plain", TWO | {"bf16": {"enabled": True}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_in_stages_is_the_model(ranks: Any, case: str) -> None:
    world, name, more = CASES[case]
    alone = {key: value for key, value in more.items() if key == "bf16"}
    (expected,) = ranks(1).run(train, name, **alone)
    tolerance = 2e-2 if "bf16" in more else 1e-5
    found = ranks(world).run(train, name, **more)
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=tolerance)
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], abs=tolerance)
        for parameter, value in expected["whole"].items():
            assert torch.allclose(rank["whole"][parameter], value, rtol=0, atol=tolerance), parameter
    held = {parameter for rank in found for parameter in rank["names"]}
    assert held == set(expected["names"])
    assert all(len(rank["names"]) < len(held) for rank in found)


def test_layers_stand_in_the_order_of_their_calls() -> None:
    layers = find_layers(
        seeded(Pictures), [], None, lambda model: model(torch.zeros(2, 3, 8, 8), torch.zeros(2).long())
    )
    assert layers.keys == ("first", "second", "wide", "head")
    assert find_layers(seeded(Around), [], None).path == "inner"


def test_the_plan_shows_them() -> None:
    made = plan(load_config(config_of(2, pipeline={"stages": 2, "partition": "uniform"})), World(2, 2))

    def loss_of(model: nn.Module) -> Tensor:
        return model(torch.zeros(4, 3, 8, 8), torch.zeros(4).long())

    facts = describe_model(lambda: seeded(Pictures), made, loss_of)
    assert facts.blocks == ("first", "second", "wide", "head")
    assert facts.forward is not None
    assert stages_of(made, facts).bounds == (0, 2, 4)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("watched", TWO, "Linear cannot be copied (TypeError: cannot pickle '_thread.lock' object)"),
        ("twice", TWO, "its child wide is called 2 times in a forward"),
        ("plain", {"pipeline": {"stages": 2, "partition": [1, 1, 2]}}, "3 counts and there are 2 stages"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(ranks: Any, name: str, more: dict[str, Any], said: str) -> None:
    for told in ranks(2).run(message, name, **more):
        assert said in told


def test_a_skip_over_a_cut_is_refused_and_not_computed_wrongly(ranks: Any) -> None:
    with pytest.raises(engine.EngineError, match="turned finite hidden states into NaN"):
        ranks(2).run(train, "skip", **TWO)
