"""The registry: names, ties, groups, and what it refuses."""

from __future__ import annotations

import pytest
from torch import nn

from engine.contracts import EngineError
from engine.parameters import ParameterRegistry
from engine.plan.placement import AXES, coordinates


def tied() -> nn.Module:
    model = nn.Module()
    model.embedding = nn.Embedding(5, 3)
    model.block = nn.Linear(3, 3)
    model.head = nn.Linear(3, 5, bias=False)
    model.head.weight = model.embedding.weight
    return model


def test_names_ties_and_blocks():
    model = tied()
    model.block.bias.requires_grad_(False)
    registry = ParameterRegistry(model, None, [model.block])
    assert [info.name for info in registry.infos] == ["embedding.weight", "block.weight", "block.bias"]
    assert registry.by_name["embedding.weight"].aliases == ("head.weight",)
    assert registry.aliases == {"head.weight": "embedding.weight"}
    assert [info.block for info in registry.infos] == [None, 0, 0]
    assert [info.group for info in registry.infos] == [0, 0, None]
    assert registry.info(model.head.weight) is registry.by_name["embedding.weight"]
    assert registry.info(nn.Linear(1, 1).weight) is None


def test_groups_keep_their_options_and_empty_ones_go():
    model = tied()
    groups = [
        {"params": [model.block.weight], "lr": 0.1},
        {"params": []},
        {"params": [("head.weight", model.head.weight)], "weight_decay": 0.0},
    ]
    registry = ParameterRegistry(model, groups)
    assert registry.groups == [{"lr": 0.1}, {"weight_decay": 0.0}]
    assert {info.name: info.group for info in registry.infos} == {
        "embedding.weight": 1,
        "block.weight": 0,
        "block.bias": None,
    }


def test_a_replaced_parameter_is_still_known():
    model = tied()
    registry = ParameterRegistry(model)
    old, new = model.block.weight, nn.Parameter(model.block.weight.detach().clone())
    registry.replace(old, new)
    assert registry.info(old) is registry.info(new)
    assert {info.name: parameter for info, parameter in registry.parameters()}["block.weight"] is new


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: [m.block.weight, {"params": [m.block.bias]}], "not a mix"),
        (lambda m: [{"params": [m.block.bias]}, {"params": [m.block.bias]}], "block.bias is in"),
        (lambda m: [nn.Parameter(m.block.bias.detach())], "that the model does not"),
        (lambda m: [{"parameters": [m.block.bias]}], "'params'"),
    ],
)
def test_what_is_refused(make, words):
    model = tied()
    with pytest.raises(EngineError, match=words):
        ParameterRegistry(model, make(model))


def test_ranks_that_differ_in_tp_only_are_neighbours():
    degrees = {**dict.fromkeys(AXES, 1), "pp": 2, "dp_shard": 3, "tp": 2}
    places = [coordinates(rank, degrees) for rank in range(12)]
    assert [place["tp"] for place in places] == [0, 1] * 6
    assert [place["dp_shard"] for place in places] == [0, 0, 1, 1, 2, 2] * 2
    assert [place["pp"] for place in places] == [0] * 6 + [1] * 6
