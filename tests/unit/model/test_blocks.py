"""Where the repeated blocks of a model are found."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from engine.contracts import EngineError
from engine.model.blocks import find_blocks
from engine.model.zero.fully_sharded import alone, group_blocks
from engine.plan.cuts import assign_owners, row_range


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleList(Layer(2) for _ in range(5))
        self.body = nn.ModuleList(Layer(8) for _ in range(3))
        self.mixed = nn.Sequential(nn.Linear(64, 64), nn.ReLU())


def test_the_largest_list_of_like_modules():
    model = Model()
    assert find_blocks(model) == list(model.body)


def test_a_path_overrides():
    model = Model()
    assert find_blocks(model, "stem") == list(model.stem)


def test_a_hint_of_the_model_outweighs_size():
    model = Model()
    model.tail = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    model._no_split_modules = ["Linear"]
    assert find_blocks(model) == list(model.tail)


@pytest.mark.parametrize("path", ["nowhere", "stem.0.linear"])
def test_a_path_that_is_no_container(path):
    with pytest.raises(EngineError, match=r"model.blocks"):
        find_blocks(Model(), path)


def test_no_blocks_and_one_block_used_twice():
    assert find_blocks(nn.Linear(2, 2)) == []
    layer = Layer(4)
    assert find_blocks(nn.ModuleList([layer, layer])) == []
    assert find_blocks(nn.Sequential(layer, layer), "") == [layer]


def test_consecutive_blocks_share_a_group_until_it_is_large_enough():
    layers = [Layer(2) for _ in range(5)]  # 6 elements each
    assert group_blocks(layers, 12) == [layers[:2], layers[2:]]
    assert group_blocks(layers, 6) == [[layer] for layer in layers]
    assert group_blocks(layers, 1000) == []


def test_blocks_that_share_a_parameter_stay_with_the_root():
    model = Model()
    model.body[1].linear.weight = model.body[2].linear.weight
    model.head = nn.Linear(8, 8)
    assert alone(model, list(model.body)) == [model.body[0]]
    model.head.bias = model.body[0].linear.bias
    assert alone(model, list(model.body)) == []


def test_row_ranges_cover_every_element_once():
    for shape in [(7, 3), (2, 5), (1,), (101, 2)]:
        for size in (2, 3, 4):
            ranges = [row_range(shape, rank, size) for rank in range(size)]
            assert ranges[0][0] == 0
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
            assert ranges[-1][1] == torch.Size(shape).numel()


def test_owners_are_balanced():
    numels = [5, 100, 90, 10, 5]
    owners = assign_owners(numels, 2)
    load = [sum(n for n, o in zip(numels, owners, strict=True) if o == rank) for rank in range(2)]
    assert load == [105, 105]
