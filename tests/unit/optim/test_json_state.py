from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch

from engine.contracts import EngineError
from engine.optim.json_state import decode, encode


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "b": {"c": (0.9, 0.999)}},
        Counter({3: 2, 5: 1}),
        {1: "int key", "1": "string key"},
        {"$float": "a user's own key"},
        [math.inf, -math.inf, 0.1 + 0.2],
        (),
        {},
    ],
)
def test_values_and_their_types_survive(value: Any) -> None:
    restored = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert restored == value
    assert type(restored) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_survive_bit_for_bit(dtype: torch.dtype) -> None:
    for tensor in (torch.tensor(1.1).to(dtype), torch.tensor([[0.3, math.inf]]).clamp(max=3.0).to(dtype)):
        restored = decode(json.loads(json.dumps(encode({"t": tensor}), allow_nan=False)))["t"]
        assert restored.dtype == dtype
        assert torch.equal(restored, tensor)


def test_functions_are_left_out_but_keep_their_place_in_a_list() -> None:
    assert encode({"scale_fn": abs, "gamma": 0.5}) == {"gamma": 0.5}
    assert encode([abs, 1]) == [None, 1]


def test_what_has_no_exact_form_is_refused_with_its_place() -> None:
    with pytest.raises(EngineError, match=r"lr_scheduler\.seen holds a set"):
        encode({"seen": {1, 2}}, "lr_scheduler")
