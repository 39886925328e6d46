"""What is read from a block by running it: layers that belong together, fused outputs, numbers that the code reads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.config.messages import EngineError
from engine.model.tensor_parallel.capture import Call, capture
from engine.model.tensor_parallel.inferred import Part, divided_numbers, find_parts, layouts
from engine.model.tensor_parallel.sketch import Sketch
from engine.model.tensor_parallel.trace import trace
from tests.parity.toy import toy_model

CPU = torch.device("cpu")


def trace_of(block, width=16):
    return trace(block, Call((torch.randn(2, 4, width, requires_grad=True),), {}))


class Parallel(nn.Module):
    """Attention and MLP side by side, a gate on single heads, an adapter, and a layer that nothing follows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.unread = 4, 4, 8
        self.qkv, self.o = nn.Linear(16, 32), nn.Linear(16, 16)  # q 16, k 8, v 8
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.router = nn.Linear(16, 2)
        self.unused = nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).split([16, 8, 8], -1)
        heads = lambda t: t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # noqa: E731
        mixed = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), enable_gqa=True)
        assert mixed.shape[1] == self.num_heads
        share = self.router(x).softmax(-1)
        return (
            x + share[..., :1] * self.o(mixed.transpose(1, 2).flatten(2)) + self.down(F.relu(self.up(x), inplace=True))
        )


def test_layers_that_feed_one_another_are_parts_and_the_rest_stays_whole():
    found = trace_of(Parallel())
    assert find_parts(found) == [Part(("qkv",), ("o",)), Part(("up",), ("down",))]
    assert found.uncalled == ("unused",)
    assert found.sources["down"] == {"up"}
    assert found.last == {"o", "down", "router"}


def test_only_numbers_that_forward_reads_count():
    found = trace_of(Parallel())
    assert found.numbers == {"num_heads": 4, "head_dim": 4}
    part = find_parts(found)[0]
    splits = next(iter(layouts(found, part, {})))
    assert next(iter(divided_numbers(found, part, splits, 2, {}))) == {"num_heads": 2}
    assert {"num_heads": 2} not in list(divided_numbers(found, part, splits, 2, {"num_heads": 2}))


def test_unequal_pieces_of_a_fused_output_are_tried():
    found = trace_of(Parallel())
    segments = [choice["qkv"].segments for choice in layouts(found, find_parts(found)[0], {})]
    assert segments == [(16, 16), (16, 8, 8), ()]


def test_a_low_rank_pair_in_front_of_a_layer_leaves_it_whole():
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.a, self.b, self.o = nn.Linear(16, 16), nn.Linear(16, 2), nn.Linear(2, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.o(torch.tanh(self.q(x) + self.b(self.a(x))))

    names = {name for part in find_parts(trace_of(Adapted())) for name in part.names}
    assert names <= {"a", "b"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_users_model_is_not_touched(device):
    with torch.device(device):
        model = toy_model(device=device)
    values = {name: (p, p.detach().clone() if device == "cpu" else None) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    sketch = Sketch(model, CPU)
    call = capture(sketch, ["blocks.2"])["blocks.2"]
    assert torch.equal(torch.get_rng_state(), state)
    assert call.args[0].shape[-1] == 64
    assert call.args[0].requires_grad
    for name, parameter in model.named_parameters():
        assert parameter is values[name][0]
        assert parameter.is_meta or torch.equal(parameter, values[name][1])
        assert parameter.grad is None
    assert model.training


def test_values_of_the_copy_are_the_same_on_every_rank_and_never_zero():
    one, other = (Sketch(toy_model(seed=seed), CPU) for seed in (0, 1))
    for sketch in (one, other):
        sketch.fill(sketch.model.blocks[0])
    for first, second in zip(one.model.blocks[0].parameters(), other.model.blocks[0].parameters(), strict=True):
        assert torch.equal(first, second)
        assert first.abs().max() > 0
    block = copy.deepcopy(one.model.blocks[0])
    one.hollow(one.model.blocks[0])
    assert all(p.is_meta for p in one.model.parameters())
    assert not any(p.is_meta for p in block.parameters())


def test_a_model_that_no_input_drives_is_refused_with_what_was_tried():
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, pair):
            left, right = pair["left"], pair["right"]
            return self.layers[1](self.layers[0](left) + right)

    with pytest.raises(EngineError) as caught:
        capture(Sketch(Strange(), CPU), ["layers.0"])
    assert "no forward of Strange came as far as layers.0" in str(caught.value)
    assert "training_data=" in str(caught.value)
    sample = ({"left": torch.randn(3, 8), "right": torch.randn(3, 8)},)
    assert capture(Sketch(Strange(), CPU), ["layers.0"], sample)["layers.0"].args[0].shape == (2, 8)


def test_a_model_that_cannot_be_copied_is_refused():
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.stream = nn.Linear(2, 2), (number for number in range(3))

    with pytest.raises(EngineError, match=r"cannot be copied.*__deepcopy__"):
        Sketch(Locked(), CPU)
