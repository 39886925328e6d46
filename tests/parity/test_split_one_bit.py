"""The 1-bit optimizers on layers split over tp ranks: each part is compressed between the data-parallel ranks as if it
were a parameter of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.model.tensor_parallel import Split, TensorPlan
from tests.parity.runs import run_steps
from tests.parity.small import Regression, config_of, regression_batch, seeded
from tests.parity.toy import Result

WIDTH, SAVED_AT, STEPS = 16, 7, 14
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 5, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4},
}
"""Both switch early: 0/1 Adam sends one bit in step 3, then steps alone, synchronised last in step 12."""


class Pair(Regression):
    """A layer cut by columns and one cut by rows, between norms that every tp rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.tensor_plan = TensorPlan({"up": Split("column"), "down": Split("row")})

    def predict(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())


class Parts(Regression):
    """`Pair`, whose halves are parameters of their own on one rank."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.norm = pair.norm
        self.ups, self.biases, self.downs = (
            nn.ParameterList(nn.Parameter(part.detach().clone()) for part in whole.chunk(2, dim))
            for whole, dim in ((pair.up.weight, 0), (pair.up.bias, 0), (pair.down.weight, 1))
        )
        self.bias = pair.down.bias

    def predict(self, x: Tensor) -> Tensor:
        parts = zip(self.ups, self.biases, self.downs, strict=True)
        return sum((nn.functional.linear(self.norm(x), up, b).tanh() @ down.T for up, b, down in parts), self.bias)


OWN_NAMES = {
    "up.weight": "ups.{}",
    "up.bias": "biases.{}",
    "down.weight": "downs.{}",
    "down.bias": "bias",
    "norm.weight": "norm.weight",
    "norm.bias": "norm.bias",
}
"""What a tp rank holds under a name of `Pair` is this parameter of `Parts`, with the rank's place in its tp group."""


def joined(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of `Parts` as those of `Pair`."""
    parts = {"up.weight": ("ups", 0), "up.bias": ("biases", 0), "down.weight": ("downs", 1)}
    whole = {name: torch.cat([values[f"{own}.{i}"] for i in range(2)], dim) for name, (own, dim) in parts.items()}
    return {
        **whole,
        "down.bias": values["bias"],
        **{f"norm.{key}": values[f"norm.{key}"] for key in ("weight", "bias")},
    }


def start(kind: str, tp: int) -> engine.Engine:
    params = {"lr": 1e-2, "eps": 1e-4, **OPTIMIZERS[kind]}
    config = config_of(0, 1, tensor_parallel={"size": tp}, optimizer={"type": kind, "params": params})
    config["zero_optimization"]["reduce_bucket_size"] = 1  # a bucket a parameter, so that chunks are the same
    pair = seeded(Pair)
    model = pair if tp > 1 else Parts(pair)  # type: ignore[arg-type]
    return engine.initialize(model=model, config=config)[0]


def train(kind: str, tp: int, folder: Path) -> tuple[Result, dict[str, Tensor]]:
    """All steps, and what this rank itself holds after them."""
    model_engine = start(kind, tp)
    result = run_steps(model_engine, regression_batch, SAVED_AT)
    model_engine.save_checkpoint(folder, tag="saved")
    return finished(model_engine, result, STEPS - SAVED_AT)


def go_on(kind: str, tp: int, folder: Path) -> tuple[Result, dict[str, Tensor]]:
    model_engine = start(kind, tp)
    model_engine.load_checkpoint(folder, "saved")
    return finished(model_engine, Result(), STEPS - SAVED_AT)


def finished(model_engine: engine.Engine, result: Result, steps: int) -> tuple[Result, dict[str, Tensor]]:
    more = run_steps(model_engine, regression_batch, steps, first=SAVED_AT)
    result.losses += more.losses
    result.norms += more.norms
    own = {info.name: p.detach().clone() for info, p in model_engine.parameter_registry.parameters()}
    result.parameters = {name: value.clone() for name, value in model_engine.full_parameters().items()}
    model_engine.destroy()
    return result, own


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_are_compressed_as_parameters_of_their_own(ranks, tmp_path, kind):
    expected = ranks(2).run(train, kind, 1, tmp_path / "dp2", timeout=240)
    is_apart = not torch.equal(*(own["bias"] for _, own in expected))
    assert is_apart == (kind == "ZeroOneAdam")
    found = ranks(4).run(train, kind, 2, tmp_path / "dp2xtp2", timeout=240)
    for rank, (result, own) in enumerate(found):
        of_data_rank, its_own = expected[rank // 2]
        assert result.losses == pytest.approx(of_data_rank.losses, rel=0, abs=1e-5)
        assert result.norms == pytest.approx(of_data_rank.norms, rel=1e-4)
        for name, value in joined(of_data_rank.parameters).items():
            assert (result.parameters[name] - value).abs().max() <= 1e-5, name
        for name, value in own.items():
            part = its_own[OWN_NAMES[name].format(rank % 2)]
            assert (value - part).abs().max() <= 1e-5, name
            if value.shape == result.parameters[name].shape:  # held whole by the tp ranks, so alike to the bit
                assert torch.equal(value, found[rank // 2 * 2][1][name]), name
    resumed = ranks(4).run(go_on, kind, 2, tmp_path / "dp2xtp2", timeout=240)
    for (again, _), (before, _) in zip(resumed, found, strict=True):
        assert again.losses == before.losses[SAVED_AT:]
        for name, value in before.parameters.items():
            assert torch.equal(again.parameters[name], value), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_data_parallel_rank_compresses_nothing(ranks, tmp_path, kind):
    (expected, _), *_ = ranks(1).run(train, kind, 1, tmp_path / "one", timeout=240)
    for result, _ in ranks(2).run(train, kind, 2, tmp_path / "tp2", timeout=240):
        assert result.losses == pytest.approx(expected.losses, rel=0, abs=1e-5)
        for name, value in joined(expected.parameters).items():
            assert (result.parameters[name] - value).abs().max() <= 1e-5, name
