"""Which blocks layer drop can pass by: what they return, what they are refused for, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.contracts import EngineError
from engine.plan.layer_drop import theta_at
from tests.unit.model.stacks import Residual, Stack, gates_at, seeded, start

__all__ = ["seeded"]


# --- what blocks return --------------------------------------------------------------------------------------------


class Returns(Residual):
    """A residual block that returns ``make(hidden)``."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(super().forward(x))


@pytest.mark.parametrize("make", [lambda x: (x,), lambda x: (x, None), lambda x: [x, ()], lambda x: (x, None, 3)])
@pytest.mark.usefixtures("seeded")
def test_a_block_left_out_returns_what_it_returns(make: Callable[[Tensor], Any]) -> None:
    shapes = []

    def call(layer: nn.Module, x: Tensor) -> Any:
        output = layer(x)
        shapes.append([type(output), len(output), *output[1:]])
        return output

    model_engine = start(Stack([Returns(make) for _ in range(4)], call))
    model_engine.global_steps = 30  # the first forward leaves some out, before anything of the kind was returned
    assert not all(gates_at(30, 0, theta_at(30, 0.3, 0.7)))
    model_engine(torch.randn(4, 3, 8))
    wanted = make(torch.zeros(1))
    assert shapes == [[type(wanted), len(wanted), *wanted[1:]]] * 4
    model_engine.destroy()


class Taught(Stack):
    """Runs itself without gradients first."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self(x)
        return super().forward(x)


@pytest.mark.usefixtures("seeded")
def test_a_forward_without_gradients_inside_a_training_forward_has_all_layers() -> None:
    layers: list[nn.Module] = [Residual() for _ in range(4)]
    model_engine = start(Taught(layers))
    model_engine.global_steps = 30
    model_engine(torch.randn(4, 3, 8))  # a layer left out before it was seen is called once for what it returns
    before = [layer.calls for layer in layers]
    model_engine(torch.randn(4, 3, 8))
    kept = gates_at(30, 1, theta_at(30, 0.3, 0.7))
    assert not all(kept)
    assert [layer.calls - calls for layer, calls in zip(layers, before, strict=True)] == [1 + gate for gate in kept]
    model_engine.destroy()


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.norm(x), 0.5, self.training)


@pytest.mark.usefixtures("seeded")
def test_a_block_left_out_in_the_first_forward_leaves_no_trace() -> None:
    model = Stack([Normalised() for _ in range(4)])
    model_engine = start(model)
    model_engine.global_steps = 30
    kept = gates_at(30, 0, theta_at(30, 0.3, 0.7))
    model_engine(torch.randn(4, 3, 8))
    assert [int(layer.norm.num_batches_tracked) for layer in model.layers] == kept  # type: ignore[union-attr]
    model_engine.destroy()


class Writes(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


REFUSED = {
    "changes the shape": (
        lambda: Returns(lambda x: torch.cat([x, x], dim=1)),
        r"block layers\.0 makes a hidden state of \(4, 6, 8\) from one of \(4, 3, 8\)",
    ),
    "attention weights": (
        lambda: Returns(lambda x: (x, torch.ones(4, 2, 3, 3))),
        r"layers\.0 returns more than its hidden state \(a tensor of \(4, 2, 3, 3\)\).*output_attentions",
    ),
    "an object": (lambda: Returns(lambda x: (x, object())), r"more than its hidden state \(object\)"),
    "writes into its input": (Writes, r"layers\.0 writes into its input"),
    "no hidden state": (
        lambda: Returns(lambda x: x.argmax(-1)),
        r"layers\.0 returns a Tensor whose first item is no floating tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("first_step", [0, 30])
def test_a_block_that_cannot_be_passed_by_is_refused(name: str, first_step: int) -> None:
    make, message = REFUSED[name]
    model = Stack([make() for _ in range(4)])
    model_engine = start(model)
    model_engine.global_steps = first_step
    with pytest.raises(EngineError, match=message):
        model_engine(torch.randn(4, 3, 8))
    model_engine.destroy()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(EngineError, match=r"Linear has no repeated blocks .* model\.blocks, let forward take"):
        start(nn.Linear(8, 8))


# --- Hugging Face --------------------------------------------------------------------------------------------------


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
            max_position_embeddings=16,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


LAYERS = {"gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer"}


def with_hooks(model: nn.Module, path: str, kept: list[bool], theta: float) -> Any:
    """The same gates by PyTorch's own means: a hook on each layer replaces its output."""
    layers = list(model.get_submodule(path))  # type: ignore[call-overload]
    hooks = []
    for index, layer in enumerate(layers):
        p = 1 - (index + 1) / len(layers) * (1 - theta)

        def gate(module: nn.Module, args: Any, kwargs: Any, output: Any, kept: bool = kept[index], p: float = p) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            after = output if isinstance(output, Tensor) else output[0]
            gated = hidden + (after - hidden) / p if kept else hidden
            return gated if isinstance(output, Tensor) else (gated, *output[1:])

        hooks.append(layer.register_forward_hook(gate, with_kwargs=True))
    return hooks


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.usefixtures("seeded")
def test_hugging_face_models(kind: str, checkpointing: bool) -> None:
    model, plain = hugging_face(kind), hugging_face(kind)
    plain.load_state_dict(model.state_dict())
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    model_engine = start(model, optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_clipping=0.0)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    tokens = torch.randint(64, (4, 16))
    for step in range(6):
        theta = theta_at(step, 0.3, 0.7)
        hooks = with_hooks(plain, LAYERS[kind], gates_at(step, 0, theta), theta)
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        for hook in hooks:
            hook.remove()
        own = model_engine(input_ids=tokens, labels=tokens)
        model_engine.backward(own.loss)
        model_engine.step()
        assert own.loss.item() == pytest.approx(loss.item(), abs=1e-5)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert model_engine.layers_skipped > 0
    model_engine.eval()
    plain.eval()
    assert torch.allclose(model_engine(input_ids=tokens).logits, plain(input_ids=tokens).logits, atol=1e-5)
    if kind != "bert":
        # generation, cache and all, is untouched
        arguments = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        prompt = tokens[:, :4]
        assert torch.equal(model.generate(prompt, **arguments), plain.generate(prompt, **arguments))  # type: ignore[operator]
    model_engine.destroy()


def test_a_training_forward_fills_no_cache() -> None:
    model = hugging_face("gpt2")
    model_engine = start(model)
    tokens = torch.randint(64, (4, 16))
    output = model_engine(input_ids=tokens, labels=tokens, use_cache=True)
    cache = getattr(output, "past_key_values", None)
    assert cache is None or cache.get_seq_length() == 0
    model_engine.destroy()
