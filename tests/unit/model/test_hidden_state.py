"""Where a block's hidden state comes in and goes out."""

from collections import namedtuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from engine.contracts import EngineError
from engine.model.hidden_state import hidden_argument, hidden_of, output_hidden, with_hidden, with_output_hidden

STATE, OTHER, IDS = torch.zeros(2, 3, 4), torch.ones(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
MASK = torch.zeros(2, 3)
Pair = namedtuple("Pair", ["state", "cache"])


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [
        ((STATE,), {}, 0),
        ((IDS, None, STATE), {"mask": MASK}, 2),
        ((MASK,), {"hidden_states": STATE}, "hidden_states"),
        ((MASK, STATE), {}, 1),
        ((), {"mask": MASK, "x": STATE}, "x"),
        ((IDS,), {"x": MASK}, "x"),
    ],
)
def test_the_hidden_state_is_found_and_replaced(args, kwargs, key):
    assert hidden_argument(args, kwargs, "block h.0") == key
    new_args, new_kwargs = with_hidden(args, kwargs, key, OTHER)
    assert hidden_of(new_args, new_kwargs, key) is OTHER
    assert len(new_args) == len(args)
    assert new_kwargs.keys() == kwargs.keys()
    kept = [value for at, value in (*enumerate(new_args), *new_kwargs.items()) if at != key]
    before = [value for at, value in (*enumerate(args), *kwargs.items()) if at != key]
    assert all(new is old for new, old in zip(kept, before, strict=True))


def test_a_call_without_a_floating_tensor_is_refused():
    with pytest.raises(EngineError, match=r"block h\.0 is called without a floating tensor"):
        hidden_argument((IDS, None, 3), {}, "block h.0")


@pytest.mark.parametrize(
    "output",
    [STATE, (STATE,), (STATE, None, IDS), [STATE, IDS], Pair(STATE, IDS), {"state": STATE, "cache": IDS}],
)
def test_an_output_keeps_its_form(output):
    assert output_hidden(output, "block h.0") is STATE
    new = with_output_hidden(output, OTHER)
    assert type(new) is type(output)
    assert output_hidden(new, "block h.0") is OTHER
    if not isinstance(output, torch.Tensor):
        assert len(new) == len(output)


def test_a_model_output_keeps_its_fields():
    new = with_output_hidden(BaseModelOutput(last_hidden_state=STATE, attentions=(MASK,)), OTHER)
    assert isinstance(new, BaseModelOutput)
    assert new.last_hidden_state is OTHER
    assert new.attentions[0] is MASK


@pytest.mark.parametrize("output", [None, (), (IDS, STATE), {}, "state"])
def test_an_output_without_a_hidden_state_is_refused(output):
    with pytest.raises(EngineError, match=r"block h\.0 returns a \w+ whose first item is no floating tensor"):
        output_hidden(output, "block h.0")
