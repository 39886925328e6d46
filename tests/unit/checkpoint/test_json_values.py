from __future__ import annotations

import enum
import json
import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import CheckpointError
from engine.checkpoint.json_values import decode, encode

keys = st.one_of(st.text(max_size=4), st.integers(-5, 5), st.booleans(), st.none(), st.tuples(st.integers(0, 3)))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.sampled_from(["__tuple__", "__items__", "__float__", "__tensor__"]).flatmap(
            lambda marker: inner.map(lambda value: {marker: value})
        ),
    ),
    max_leaves=6,
)


def same(first, second):
    """Equal with equal types: (1,) is not [1], True is not 1, -0.0 is not 0.0."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return len(first) == len(second) and all(
            same(*pair)
            for pairs in zip(first.items(), second.items(), strict=True)
            for pair in zip(*pairs, strict=True)
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(*pair) for pair in zip(first, second, strict=True))
    return repr(first) == repr(second)


@settings(max_examples=80, deadline=None)
@given(values)
def test_values_come_back_with_their_types(value):
    text = json.dumps(encode(value, "client_state"), allow_nan=False)
    assert same(decode(json.loads(text), "client_state"), value)


def test_nan_and_numpy_and_enums_become_plain_values():
    class Phase(enum.IntEnum):
        WARM = 3

    value = encode([math.nan, numpy.float32(0.5), numpy.int64(4), Phase.WARM], "x")
    back = decode(json.loads(json.dumps(value, allow_nan=False)), "x")
    assert math.isnan(back[0])
    assert same(back[1:], [0.5, 4, 3])


def test_tensors_go_through_the_callback_by_name():
    kept = {}

    def keep(tensor):
        kept[f"t{len(kept)}"] = tensor
        return f"t{len(kept) - 1}"

    value = {"a": [torch.ones(2)], "b": torch.zeros(())}
    encoded = json.loads(json.dumps(encode(value, "x", keep)))
    back = decode(encoded, "x", kept.__getitem__)
    assert back["a"][0] is value["a"][0]
    assert back["b"] is value["b"]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {2, 3}]}, r"x\.a\[1\]: a builtins.set"),
        ({"run": object()}, r"x\.run: a builtins.object"),
        ({"t": torch.ones(1)}, r"x\.t: a torch.Tensor"),
        ({"b": b"raw"}, r"x\.b: a builtins.bytes"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_path(value, path):
    with pytest.raises(CheckpointError, match=path):
        encode(value, "x")


def test_a_cycle_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(loop, "x")


@pytest.mark.parametrize(
    "value",
    [
        {"__items__": 3},
        {"__items__": [[1]]},
        {"__items__": [[[1], 2]]},
        {"__float__": "1e9"},
        {"__tuple__": {}},
        {"__tensor__": "parameters.w"},
        {"__tensor__": 3},
    ],
)
def test_malformed_values_are_refused(value):
    with pytest.raises(CheckpointError, match=r"x.*malformed"):
        decode({"a": value}, "x")
