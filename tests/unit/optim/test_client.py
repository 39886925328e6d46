"""A user's own optimizer is moved onto shards, or refused and left alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from engine.contracts import EngineError
from engine.optim.client import rebind
from tests.unit.optim.test_optimizer import build, parameters, set_gradients, shards_of


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_client_optimizer_steps_on_shards_with_its_own_options(cls: Any) -> None:
    model = parameters()
    client = cls([{"params": [model["matrix"]], "lr": 0.5}, {"params": [model["linear.weight"], model["linear.bias"]]}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(client, gamma=0.5)
    whole = parameters()
    reference = cls([{"params": [whole["matrix"]], "lr": 0.5}, {"params": [whole["linear.weight"]]}])
    shards = shards_of(model)
    optimizer = rebind(client, shards.__getitem__)
    assert optimizer.inner == (client,)
    assert [group["param_names"] for group in optimizer.param_groups] == [["matrix"], ["linear.weight"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            set_gradients(whole, step)
            for name in ("matrix", "linear.weight"):
                ((_, shard),) = shards[model[name]]
                gradient = whole[name].grad
                assert gradient is not None
                shard.grad = gradient.flatten()[: shard.numel()].clone() * 4.0
            optimizer.apply(0.25)
            schedule.step()
            reference.step()
            for group in reference.param_groups:
                group["lr"] *= 0.5
    for name in ("matrix", "linear.weight"):
        ((_, shard),) = shards[model[name]]
        torch.testing.assert_close(shard.detach(), whole[name].detach().flatten()[: shard.numel()])


def test_client_optimizers_that_cannot_work_are_refused_and_left_alone() -> None:
    model = parameters()
    stepped = torch.optim.AdamW(model.values())
    set_gradients(model, 0)
    stepped.step()
    with pytest.raises(EngineError, match="already stepped"):
        rebind(stepped, shards_of(model).__getitem__)
    adagrad = torch.optim.Adagrad(model.values())
    adagrad.step()
    with pytest.raises(EngineError, match="already stepped"):
        rebind(adagrad, shards_of(model).__getitem__)
    stranger = torch.nn.Parameter(torch.ones(2, 7))
    mixed = torch.optim.SGD([{"params": [model["matrix"]]}, {"params": [stranger]}])
    with pytest.raises(EngineError, match=r"group 1 of the SGD.*shape \(2, 7\)"):
        rebind(mixed, shards_of(model).__getitem__)
    with pytest.raises(EngineError, match="not a parameter of the model"):
        rebind(mixed, shards_of(model).get)
    assert mixed.param_groups[0]["params"][0] is model["matrix"]
    with pytest.raises(EngineError, match="LBFGS"):
        rebind(torch.optim.LBFGS(model.values()), shards_of(model).__getitem__)
    with pytest.raises(EngineError, match="already belongs"):
        rebind(build("SGD", {}, parameters()), shards_of(model).__getitem__)
