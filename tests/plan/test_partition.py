"""Where layers are cut: against every possible cut, one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.messages import EngineError
from engine.plan.partition import Layer, balanced, by_type, cut, uniform


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [(0, *bounds, num_layers) for bounds in inner]


def weights_of(bounds: tuple[int, ...], weights: list[int]) -> list[int]:
    return [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]


def layers(*numbers: int, kind: str = "Block") -> list[Layer]:
    return [Layer(f"layers.{index}", kind, number) for index, number in enumerate(numbers)]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "bounds"),
    [(8, 4, (0, 2, 4, 6, 8)), (10, 4, (0, 3, 6, 8, 10)), (5, 2, (0, 3, 5)), (3, 3, (0, 1, 2, 3)), (7, 1, (0, 7))],
)
def test_uniform_gives_the_first_stages_more(num_layers, num_stages, bounds):
    assert uniform(num_layers, num_stages) == bounds


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 5))
def test_balanced_is_the_best_of_all_cuts(weights, num_stages):
    if num_stages > len(weights):
        return
    bounds = balanced(weights, num_stages)
    best = min((max(parts), sum(p * p for p in parts)) for parts in
               (weights_of(b, weights) for b in all_cuts(len(weights), num_stages)))  # fmt: skip
    found = weights_of(bounds, weights)
    assert (max(found), sum(p * p for p in found)) == best
    assert all(a < b for a, b in itertools.pairwise(bounds))


def test_by_type_counts_the_layers_that_match():
    kinds = ["Embedding", "Block", "Block", "Block", "Block", "Norm", "Head"]
    assert by_type("block", kinds, 2) == (0, 3, 7)
    with pytest.raises(EngineError, match="matches 1 layer and there are 2 stages"):
        by_type("^Head$", kinds, 2)


def test_what_is_around_the_layers_weighs_on_the_ends():
    assert cut("parameters", layers(10, 10, 10, 10), 2) == (0, 2, 4)
    assert cut("parameters", layers(10, 10, 10, 10), 2, before=15) == (0, 1, 4)
    assert cut("best", layers(10, 10, 10, 10), 2, after=15) == (0, 3, 4)


def test_a_list_is_taken_as_it_is():
    assert cut([1, 3], layers(1, 1, 1, 1), 2) == (0, 1, 4)
    with pytest.raises(EngineError, match=r"\[1, 2\] deals out 3 layers.*\[2, 2\] would fit"):
        cut([1, 2], layers(1, 1, 1, 1), 2)


def test_more_stages_than_layers_is_refused_with_what_fits():
    with pytest.raises(EngineError, match=r"3 stages .* the model has 2 layers .*at most 2 fit"):
        cut("uniform", layers(1, 1), 3)


def test_a_stage_with_nothing_to_train_is_refused_by_name():
    with pytest.raises(EngineError, match=r"stage 1 of 3 would hold layers.1 and nothing to train; 2 of the 3 layers"):
        cut("uniform", layers(1, 0, 1), 3)
