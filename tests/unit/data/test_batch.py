"""What counts as a batch, a loss and a token."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch

from engine.contracts import EngineError, LossSum
from engine.data.batch import call_with_batch, count_tokens, loss_of, loss_with_batch, place


def record(*args, **kwargs):
    return args, kwargs


def test_how_a_batch_is_passed():
    assert call_with_batch(record, {"a": 1}) == ((), {"a": 1})
    assert call_with_batch(record, (1, 2)) == ((1, 2), {})
    assert call_with_batch(record, [1, 2]) == ((1, 2), {})
    assert call_with_batch(record, 3) == ((3,), {})


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


LOSS = torch.tensor(2.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "output",
    [LOSS, LOSS.reshape(1), Output(LOSS, torch.zeros(3)), {"loss": LOSS}, OrderedDict(loss=LOSS), (LOSS, 1), [LOSS]],
)
def test_where_a_loss_is_found(output):
    loss = loss_of(output)
    assert isinstance(loss, torch.Tensor)
    assert loss.shape == ()
    assert loss.item() == 2.0


def test_a_loss_sum_stays_one():
    total = LossSum(LOSS, 3.0)
    assert loss_of(total) is total


@pytest.mark.parametrize("output", [torch.zeros(3), None, {"logits": LOSS}, (), Output(None, torch.zeros(2)), "loss"])
def test_no_loss(output):
    with pytest.raises(EngineError, match="no scalar loss"):
        loss_of(output)


def test_loss_fn_takes_outputs_and_targets():
    loss = loss_with_batch(
        lambda x: x * 2, (torch.tensor(3.0), torch.tensor(5.0)), lambda out, target: out - target, CPU
    )
    assert loss == torch.tensor(1.0)
    with pytest.raises(EngineError, match=r"\(inputs, targets\)"):
        loss_with_batch(record, {"x": 1}, lambda out, target: out, CPU)


def test_floats_are_cast_wherever_they_are_and_integers_never():
    batch = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "more": [(torch.ones(1), "text", None, 3.5)]}
    placed = place(batch, torch.device("cpu"), torch.bfloat16)
    assert placed["x"].dtype == torch.bfloat16
    assert placed["ids"].dtype == torch.int64
    assert placed["more"][0][0].dtype == torch.bfloat16
    assert placed["more"][0][1:] == ("text", None, 3.5)
    assert place(batch, torch.device("cpu"), None)["x"] is batch["x"]


def test_tokens_are_counted_once():
    ids = torch.ones(4, 8, dtype=torch.int64)
    assert count_tokens({"input_ids": ids, "labels": ids}) == 32
    assert count_tokens((torch.ones(4, 8), torch.ones(4, dtype=torch.int64))) == 0
    assert count_tokens(((), {"a": {"deep": ids}})) == 32
