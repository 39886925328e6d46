"""Models that say nothing about how they are split, and what ranks do to find out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.config.messages import EngineError
from engine.mesh import Mesh
from engine.model.blocks import find_blocks
from engine.model.tensor_parallel.find import find_plan
from engine.plan import Degrees
from tests.parity.runs import step_through
from tests.parity.small import seeded
from tests.parity.toy import SEQUENCE_LENGTH, VOCABULARY_SIZE, Result, toy_model


class WithLoss(nn.Module):
    """A transformers model that gives its loss alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=input_ids, labels=labels).loss
        return loss


def hugging_face(name: str, **changes: Any) -> nn.Module:
    """A tiny model of transformers, built from its config."""
    import transformers

    common = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": SEQUENCE_LENGTH,
    }
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"n_positions": SEQUENCE_LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    classes: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 257, **gpt2}),
        "llama": ("LlamaConfig", "LlamaForCausalLM", {**common, "num_key_value_heads": 4}),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**common, "num_key_value_heads": 4, "tie_word_embeddings": True}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**common, "num_key_value_heads": 4, "head_dim": 16}),
        "bert": ("BertConfig", "BertForMaskedLM", {**common, **quiet}),
        "mixtral": (
            "MixtralConfig",
            "MixtralForCausalLM",
            {**common, "num_key_value_heads": 4, "num_local_experts": 4},
        ),
    }
    config, model, arguments = classes[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**{**arguments, **changes}))  # type: ignore[no-any-return]


class OddBlock(nn.Module):
    """Attention and a gated MLP under names that say nothing; ``z`` is the number of heads."""

    def __init__(self, width: int, z: int, fixed: int = 0) -> None:
        super().__init__()
        self.z, self._fixed = z, {"count": fixed}
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))
        self.e, self.f, self.g = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.n1(x), self._fixed["count"] or self.z
        q, k, v = (m(y).unflatten(-1, (z, -1)).transpose(1, 2) for m in (self.b, self.d, self.a))
        x = x + self.c(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.n2(x)
        return x + self.g(F.silu(self.f(y)) * self.e(y))


class Odd(nn.Module):
    """A user's language model; ``fixed``: a number of heads that no attribute of a module holds."""

    def __init__(self, width: int = 64, z: tuple[int, ...] = (4, 4), fixed: int = 0) -> None:
        super().__init__()
        self.stuff = nn.Embedding(VOCABULARY_SIZE, width)
        self.things = nn.Sequential(*(OddBlock(width, heads, fixed) for heads in z))
        self.out = nn.Linear(width, VOCABULARY_SIZE)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.out(self.things(self.stuff(input_ids)))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pointwise(nn.Module):
    """Nothing in it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 4, 3), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x.transpose(1, 2)).transpose(1, 2))


def unplanned(name: str, **changes: Any) -> nn.Module:
    makers: dict[str, Callable[..., nn.Module]] = {
        "example": toy_model,
        "odd": Odd,
        "pointwise": Pointwise,
        "alone": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
    }
    if name in makers:
        return seeded(functools.partial(makers[name], **changes))
    return WithLoss(hugging_face(name, **changes))


def train_unplanned(name: str, config: dict[str, Any], steps: int) -> tuple[Result, dict[str, Tensor]]:
    """Train with nothing said of how layers are split: losses and norms of this rank, whole parameters."""
    model_engine, *_ = engine.initialize(model=unplanned(name), config=config)
    result = step_through(model_engine, steps)
    parameters = {key: value.cpu() for key, value in model_engine.full_parameters().items()}
    model_engine.destroy()
    return result, parameters


def look(
    name: str, section: dict[str, Any], tp: int, changes: dict[str, Any] | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Find a plan for a model on ``tp`` ranks: what was found, or what was refused; and what was touched."""
    with torch.device(device):
        model = unplanned(name, **(changes or {}))
    config = load_config({"tensor_parallel": {"size": tp, **section}})
    before = {key: (id(p), p.device.type) for key, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    mesh = Mesh(Degrees(tp=tp), torch.device("cpu"))
    try:
        found = find_plan(model, find_blocks(model), mesh, config.tensor_parallel, config.locate)
    except EngineError as error:
        return {"refused": str(error), "type": type(error).__name__}
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert {key: (id(p), p.device.type) for key, p in model.named_parameters()} == before
    plan = found.plan
    return {
        "splits": dict(plan.splits),
        "attributes": dict(plan.attributes),
        "summed": plan.summed,
        "origin": plan.origin,
        "lines": found.lines,
    }
