"""Logits cut over the vocabulary answer as the whole tensor does, and lose as it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.config.messages import EngineError
from engine.cut import Cut
from engine.model.tensor_parallel.logits import CutLogits

BATCH, LENGTH, VOCABULARY = 2, 3, 11


def values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(BATCH, LENGTH, VOCABULARY, generator=generator)
    target = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    target[0, 1] = -100
    return logits, target


LOSSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "mean": lambda x, t: F.cross_entropy(x.view(-1, VOCABULARY), t.view(-1)),
    "sum": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x.reshape(-1, x.shape[-1]), t.view(-1), reduction="none"),
    "another ignored": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.clamp(0).flatten(), ignore_index=3),
    "smoothed": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), label_smoothing=0.2),
    "module": lambda x, t: torch.nn.CrossEntropyLoss()(x.float().view(-1, x.size(-1)), t.view(-1)),
    "shifted": lambda x, t: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, VOCABULARY), t[..., 1:].reshape(-1)),
    "masked": lambda x, t: F.cross_entropy(x[t >= 0], t[t >= 0]),
    "scaled": lambda x, t: F.cross_entropy((x / 3.0 * 2).tanh().view(-1, VOCABULARY), t.view(-1)),
    "one token": lambda x, t: F.cross_entropy(x[1, 0], t[1, 0]),
    "bf16": lambda x, t: F.cross_entropy(x.to(torch.bfloat16).view(-1, VOCABULARY), t.view(-1)).float(),
    "float64": lambda x, t: F.cross_entropy(x.double().view(-1, VOCABULARY), t.view(-1)),
}
"""Without joining."""
JOINED: dict[str, Callable[[Any, Tensor], Any]] = {
    "classes second": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "weighted": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), weight=torch.arange(1.0, VOCABULARY + 1)),
    "probabilities": lambda x, t: F.cross_entropy(x.flatten(0, 1), torch.full((6, VOCABULARY), 1 / VOCABULARY)),
    "log-softmax": lambda x, t: -x.log_softmax(-1).flatten(0, 1).gather(1, t.clamp(0).view(-1, 1)).mean(),
    "first columns": lambda x, t: x[..., :4].float().square().mean(),
    "greatest": lambda x, t: x.amax(-1).mean() + 0 * x.argmax(-1).sum(),
    "added": lambda x, t: (x + torch.arange(float(VOCABULARY))).square().mean(),
}


def outcomes() -> dict[str, Any]:
    """``name -> (loss, gradient of this rank's columns, joins)``, and some answers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = ShardGroup(dist.group.WORLD, "tp", Ledger())
    cut = Cut((VOCABULARY,), 0, (VOCABULARY,), size, rank)
    whole, target = values()
    found: dict[str, Any] = {}
    for name, loss_of in (LOSSES | JOINED).items():
        part = cut.part(whole, -1).requires_grad_()
        logits = CutLogits.of(part * 1.0, cut, group)
        loss = loss_of(logits, target)
        loss.sum().backward()
        found[name] = (loss.detach(), part.grad, name in JOINED)
    logits = CutLogits.of(cut.part(whole, -1), cut, group)
    found["shape"] = (tuple(logits.shape), logits.size(-1), logits.numel(), len(logits), logits.dim(), repr(logits))
    found["joined"] = logits + 0 * torch.ones(VOCABULARY)
    for name, change in {"in place": lambda: logits.mul_(2.0), "item": lambda: logits.__setitem__(0, 1.0)}.items():
        try:
            change()
            found[name] = "no error"
        except EngineError as error:
            found[name] = str(error)
    try:
        F.cross_entropy(logits.view(-1, VOCABULARY), torch.full((6,), VOCABULARY))
    except IndexError as error:
        found["out of bounds"] = str(error)
    return found


@pytest.fixture(scope="module", params=[2, 3])
def by_rank(ranks, request):
    return ranks(request.param).run(outcomes, timeout=120)


@pytest.mark.parametrize("name", [*LOSSES, *JOINED])
def test_losses_and_gradients(by_rank, name):
    whole, target = values()
    whole.requires_grad_()
    expected = (LOSSES | JOINED)[name](whole, target)
    expected.sum().backward()
    bound = 2e-2 if name == "bf16" else 1e-6
    gradient = torch.cat([found[name][1] for found in by_rank], -1)
    torch.testing.assert_close(gradient, whole.grad, rtol=bound, atol=bound)
    for found in by_rank:
        torch.testing.assert_close(found[name][0], expected.detach(), rtol=bound, atol=bound)
        assert torch.equal(found[name][0], by_rank[0][name][0])


def test_answers(by_rank):
    size = len(by_rank)
    for rank, found in enumerate(by_rank):
        *numbers, text = found["shape"]
        assert numbers == [(BATCH, LENGTH, VOCABULARY), VOCABULARY, BATCH * LENGTH * VOCABULARY, BATCH, 3]
        assert text == f"CutLogits(shape=({BATCH}, {LENGTH}, {VOCABULARY}), columns {rank + 1} of {size})"
        assert torch.equal(found["joined"], values()[0])
        assert "mul_ would change logits in place" in found["in place"]
        assert "__setitem__ would change" in found["item"]
        assert found["out of bounds"] == f"Target {VOCABULARY} is out of bounds."
