"""`pipeline.partition: "time"`: layers are really timed, ranks cut alike, and what cannot be timed is refused."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.model.pipeline.layers import find_layers
from engine.model.pipeline.profile import measure_layers
from tests.parity.pipeline_models import cross_entropy, seeded

SLOW_SECONDS, WIDTH = 0.05, 4


class Layer(nn.Module):
    """Sleeps in forward; has dropout and running statistics, which measuring must leave alone."""

    def __init__(self, seconds: float, width: int = WIDTH) -> None:
        super().__init__()
        self.seconds, self.linear, self.norm = seconds, nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.dropout(self.norm(self.linear(x)))


def model_of(*seconds: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(Layer, seconds))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_a_layer_takes_the_time_that_it_takes() -> None:
    model = model_of(0.0, SLOW_SECONDS, 0.0, 2 * SLOW_SECONDS)
    state = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    sample, target = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0)), torch.zeros(2, WIDTH)
    layers = find_layers(model, [], None)
    times = measure_layers(model, layers, lambda: square(model(sample), target), contextlib.nullcontext)
    _, first, second, third, fourth, _ = (nanoseconds / 1e9 for nanoseconds in times)
    assert second >= SLOW_SECONDS
    assert fourth >= 2 * SLOW_SECONDS
    assert first < second < fourth
    assert third < second
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def settings(**pipeline: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "pipeline": {"stages": 2, **pipeline},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def names_of(*seconds: float) -> tuple[list[str], float]:
    """What this rank holds of a model, and the loss of a step."""
    data = [(torch.full((WIDTH,), float(index)), torch.zeros(WIDTH)) for index in range(8)]
    model = model_of(*seconds)
    model_engine, _, loader, _ = engine.initialize(
        model=model, config=settings(partition="time"), training_data=data, loss_fn=square
    )
    assert loader is not None
    loss = model_engine.train_batch(iter(loader)).item()
    names = sorted({name.partition(".")[0] for name, _ in model_engine.module.named_parameters()})
    model_engine.destroy()
    return names, loss


def train_llama(**more: Any) -> tuple[float, int]:
    """The loss of the second step, and how many elements this rank holds."""
    tokens = torch.randint(31, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    config = {**settings(), **more}
    if "pipeline" not in more:
        del config["pipeline"]
    model_engine, _, loader, _ = engine.initialize(model=seeded("llama"), config=config, training_data=data)
    assert loader is not None
    batches = iter(loader)
    losses = [model_engine.train_batch(batches).item() for _ in range(2)]
    held = sum(parameter.numel() for parameter in model_engine.module.parameters())
    model_engine.destroy()
    return losses[1], held


def refused(kind: str) -> str:
    data = [(torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))] * 4 if kind == "meta" else None
    with pytest.raises(engine.EngineError) as raised:
        engine.initialize(
            model=seeded("meta" if kind == "meta" else "tied_layers"),
            config=settings(partition="time"),
            training_data=data,
            loss_fn=cross_entropy,
        )
    return str(raised.value)


def test_the_slow_layer_has_a_rank_to_itself(ranks: Any) -> None:
    held = ranks(2).run(names_of, 0.0, 0.0, 0.0, 4 * SLOW_SECONDS, timeout=120)
    assert [names for names, _ in held] == [["0", "1", "2"], ["3"]]
    assert held[0][1] == held[1][1]
    held = ranks(2).run(names_of, 4 * SLOW_SECONDS, 0.0, 0.0, 0.0, timeout=120)
    assert [names for names, _ in held] == [["0"], ["1", "2", "3"]]


@pytest.mark.parametrize(("kind", "said"), [("no data", "initialize() got none"), ("meta", "meta device")])
def test_what_cannot_be_timed_is_refused_on_every_rank(ranks: Any, kind: str, said: str) -> None:
    told = ranks(2).run(refused, kind)
    assert told[0] == told[1]
    assert said in told[0]


def test_split_layers_are_timed_too(ranks: Any) -> None:
    timed = {"pipeline": {"stages": 2, "partition": "time"}, "tensor_parallel": {"size": 2}}
    (expected, whole), *_ = ranks(1).run(train_llama)
    for loss, held in ranks(4).run(train_llama, timeout=120, **timed):
        assert loss == pytest.approx(expected, abs=1e-5)
        assert held < whole / 2
