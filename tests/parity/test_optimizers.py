"""Every optimizer steps on shards as it steps on whole parameters in one process; client optimizers and schedules."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.contracts import EngineError
from engine.optim.lamb import Lamb
from engine.optim.lion import Lion
from tests.parity.compare import assert_equal_to
from tests.parity.runs import Pieces, pieces_of
from tests.parity.small import Case, config_of, gpt, plain_loop, run_steps, token_batch
from tests.parity.toy import Result

STEPS = 4
WORLD = 2
STAGES = range(4)
EPS = {"eps": 1e-4}
LAMB = {"lr": 1e-2, "weight_decay": 0.1, **EPS}


def uneven_gpt() -> nn.Module:
    """Row norms differ, so that the norm of a shard says little of the whole parameter's."""
    model = gpt()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.linspace(0.2, 1.8, p.shape[0]).view(-1, *[1] * (p.ndim - 1)))
    return model


CASE = Case(uneven_gpt, token_batch)

# JSON type and params -> the plain class and its arguments
Maker = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Maker]] = {
    "Adam": (
        "Adam",
        {"lr": 3e-3, "weight_decay": 0.1, "adam_w_mode": False, **EPS},
        lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1, **EPS),
    ),
    "AdamW": (
        "Adam",  # as in DeepSpeed
        {"lr": 3e-3, "weight_decay": 0.1, **EPS},
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, **EPS),
    ),
    "SGD": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "Adagrad": ("Adagrad", {"lr": 3e-3, **EPS}, lambda p: torch.optim.Adagrad(p, lr=3e-3, **EPS)),
    "RAdam": (
        "RAdam",
        {"lr": 3e-3, "betas": [0.5, 0.6], **EPS},
        lambda p: torch.optim.RAdam(p, lr=3e-3, betas=(0.5, 0.6), **EPS),
    ),
    "NAdam": ("NAdam", {"lr": 3e-3, **EPS}, lambda p: torch.optim.NAdam(p, lr=3e-3, **EPS)),
    "Adamax": ("Adamax", {"lr": 3e-3, **EPS}, lambda p: torch.optim.Adamax(p, lr=3e-3, **EPS)),
    "RMSprop": (
        "RMSprop",
        {"lr": 1e-3, "momentum": 0.5, "centered": True, "eps": 1e-3},
        lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True, eps=1e-3),
    ),
    "Lion": ("Lion", {"lr": 1e-4, "weight_decay": 0.1}, lambda p: Lion(p, lr=1e-4, weight_decay=0.1)),
    "Muon": ("Muon", {"lr": 3e-3, "weight_decay": 0.1}, lambda p: PlainMuon(p)),
    "Adafactor": ("Adafactor", {"lr": 3e-3}, lambda p: torch.optim.Adafactor(p, lr=3e-3)),
    "Lamb": (
        "Lamb",
        {**LAMB, "exclude_from_adaptation": ["ndim<=1"]},
        lambda p: Lamb(p, **LAMB, max_coeff=10.0, min_coeff=0.01, exclude_from_adaptation=["ndim<=1"]),
    ),
}


AMPLIFIED = {"Lion": 1e-4, "Muon": 5e-4}
"""A sign, and an orthogonalisation in bfloat16, turn rounding noise into parts of steps of 1e-4 and 3e-3."""


class PlainMuon:
    """What users of plain PyTorch write: Muon for the hidden matrices, AdamW for the rest."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        names = {tuple(p.shape): name for name, p in gpt().named_parameters()}
        hidden = [p for p in parameters if p.ndim == 2 and "embed" not in names[tuple(p.shape)]]
        rest = [p for p in parameters if not any(p is h for h in hidden)]
        self.optimizers = [
            torch.optim.Muon(hidden, lr=3e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original"),
            torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-10),
        ]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@functools.cache
def reference(name: str) -> Result:
    return plain_loop(CASE, WORLD, STEPS, OPTIMIZERS[name][2])


def outcome_of(model_engine: engine.Engine, steps: int = STEPS) -> tuple[Result, Pieces, dict[str, Any]]:
    result = run_steps(model_engine, CASE.batch, steps)
    outcome = result, pieces_of(model_engine), {}
    model_engine.destroy()
    return outcome


def train_with_all(stage: int) -> dict[str, Any]:
    outcomes = {}
    for name, (kind, params, _) in OPTIMIZERS.items():
        config = config_of(stage, 1, optimizer={"type": kind, "params": params})
        outcomes[name] = outcome_of(engine.initialize(model=CASE.model(), config=config)[0])
    return outcomes


@pytest.fixture(scope="module")
def outcomes(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(train_with_all, stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_json_optimizer(outcomes, name, stage):
    parameters = AMPLIFIED.get(name, 1e-5)
    assert_equal_to(reference(name), [rank[name] for rank in outcomes(stage)], parameters=parameters, norms=1e-5)


# --- client optimizers ---------------------------------------------------------------------------------------

CLIENTS: dict[str, Maker] = {
    "AdamW": OPTIMIZERS["AdamW"][2],
    "Adagrad": OPTIMIZERS["Adagrad"][2],
    "Lamb": lambda p: Lamb(p, **LAMB, exclude_from_adaptation=["ndim<=1"]),
    "Adafactor": OPTIMIZERS["Adafactor"][2],
    "a class of the user's own": lambda p: Normalised(p),
}


class Normalised(torch.optim.Optimizer):
    """Divides each gradient by its own norm: wrong on anything but whole parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-3))


@functools.cache
def client_reference(name: str) -> Result:
    return plain_loop(CASE, WORLD, STEPS, CLIENTS[name])


def train_with_clients(stage: int) -> dict[str, list[Any]]:
    """Each as an object built on the model, and as a callable that builds it."""
    config = config_of(stage, 1)
    del config["optimizer"]
    outcomes = {}
    for name, make in CLIENTS.items():
        model = CASE.model()
        built = make(list(model.parameters()))
        both = []
        both.append(outcome_of(engine.initialize(model=model, config=config, optimizer=built)[0]))
        both.append(outcome_of(engine.initialize(model=CASE.model(), config=config, optimizer=make)[0]))
        outcomes[name] = both
    return outcomes


@pytest.fixture(scope="module")
def client_outcomes(ranks):
    return functools.cache(lambda stage: ranks(WORLD).run(train_with_clients, stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CLIENTS)
def test_client_optimizer(client_outcomes, name, stage):
    for form in range(2):
        assert_equal_to(client_reference(name), [rank[name][form] for rank in client_outcomes(stage)], norms=1e-5)


# --- schedules -----------------------------------------------------------------------------------------------


def warmup(k: int) -> float:
    """WarmupLR from 0 to 1e-2 over 4 steps, logarithmic; two steps at the minimum, as in DeepSpeed."""
    n = k - 1
    return 1e-2 if n >= 4 else 1e-2 * math.log(n + 1) / math.log(4) if n >= 0 else 0.0


def decay(k: int) -> float:
    n = k - 1
    return 1e-2 * max(0.0, (8 - n) / 6) if n >= 2 else 1e-2 * n / 2 if n >= 0 else 0.0


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "WarmupLR": ({"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}, warmup),
    "WarmupDecayLR": (
        {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": 8, "warmup_type": "linear"},
        decay,
    ),
    "LRRangeTest": (
        {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5},
        lambda k: 1e-3 * (1 + 0.5 * k / 2),
    ),
    "StepLR": ({"step_size": 2, "gamma": 0.1}, lambda k: 3e-3 * 0.1 ** (k // 2)),
    "ExponentialLR": ({"gamma": 0.5}, lambda k: 3e-3 * 0.5**k),
}


def lr_sequence(kind: str | None, params: dict[str, Any], client: str | None = None) -> tuple[list[float], list[str]]:
    """The lr before the first step and of every step, over 6 steps of 2 micro-batches; and the warnings."""
    config = config_of(1, 2)
    model = CASE.model()
    arguments: dict[str, Any] = {}
    if kind is not None:
        config["scheduler"] = {"type": kind, "params": params}
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if client == "object":
            scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        else:
            scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
        if client != "callable on a JSON optimizer":
            arguments["optimizer"] = optimizer
            del config["optimizer"]
        arguments["lr_scheduler"] = scheduler
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_engine, *_ = engine.initialize(model=model, config=config, **arguments)
        rates = [model_engine.get_lr()[0]]
        for step in range(6):
            run_steps(model_engine, CASE.batch, 1, first=step)
            assert model_engine.last_report is not None
            rates.append(model_engine.last_report.lr)
    model_engine.destroy()
    return rates, [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_json_schedule(ranks, kind):
    params, closed_form = SCHEDULES[kind]
    for rates, complaints in ranks(WORLD).run(lr_sequence, kind, params):
        assert rates == pytest.approx([closed_form(0), *(closed_form(k) for k in range(6))])
        assert complaints == []


@pytest.mark.parametrize("client", ["object", "callable", "callable on a JSON optimizer"])
def test_client_schedule(ranks, client):
    for rates, complaints in ranks(WORLD).run(lr_sequence, None, {}, client):
        assert rates == pytest.approx([3e-3, *(3e-3 * 0.1 ** (k // 2) for k in range(6))])
        assert complaints == []


def test_a_scheduler_of_a_foreign_optimizer_is_refused():
    model = CASE.model()
    foreign = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(model.parameters()), 2)
    with pytest.raises(EngineError, match=r"lr_scheduler.*another optimizer"):
        engine.initialize(model=model, config=config_of(0, 1), lr_scheduler=foreign)


def test_a_scheduler_that_needs_a_metric_is_refused():
    with pytest.raises(EngineError, match=r"ReduceLROnPlateau.*metric"):
        engine.initialize(
            model=CASE.model(), config=config_of(0, 1), lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau
        )
