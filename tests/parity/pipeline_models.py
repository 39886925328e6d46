"""Models that pipelines are made of: lists of layers, Hugging Face decoders, and some that cannot be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engine
from engine import LayerSpec, PipelineModule, TiedLayerSpec
from tests.parity.runs import pieces_of
from tests.parity.toy import toy_model

WIDTH, VOCABULARY, BATCH = 16, 31, 8


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class WithMask(nn.Module):
    """Hidden states of three kinds: a float tensor, an integer one that wants no gradient, and a plain number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Residual(width)

    def forward(self, state: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, int]:
        x, mask, count = state
        return self.inner(x) * mask.unsqueeze(-1), mask, count + 1


class Begin(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        return self.embedding(tokens), (tokens > 3).long(), 0


class End(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, state: tuple[Tensor, Tensor, int]) -> Tensor:
        assert state[2] == 4
        return self.head(state[0])


def to_logits(module: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)  # type: ignore[arg-type]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tied_layers(**more: Any) -> PipelineModule:
    embedding = {"num_embeddings": VOCABULARY, "embedding_dim": WIDTH}
    layers = [
        TiedLayerSpec("embed", nn.Embedding, **embedding),
        *(LayerSpec(Residual, WIDTH) for _ in range(4)),
        nn.LayerNorm(WIDTH),
        torch.tanh,
        TiedLayerSpec("embed", nn.Embedding, forward_fn=to_logits, **embedding),
    ]
    return PipelineModule(layers, loss_fn=cross_entropy, **more)


def tuples(**more: Any) -> PipelineModule:
    layers = [LayerSpec(Begin, WIDTH), *(LayerSpec(WithMask, WIDTH) for _ in range(4)), LayerSpec(End, WIDTH)]
    return PipelineModule(layers, loss_fn=cross_entropy, **more)


def sequential(**more: Any) -> nn.Sequential:
    """Statistics of batch normalisation inside a stage, a layer without parameters, a frozen one."""
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Residual(WIDTH), nn.Tanh(), Residual(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )
    model[1].linear.weight.requires_grad_(False)
    return model


def on_meta(**more: Any) -> PipelineModule:
    """Without values: each rank fills what it holds, as one process fills all."""
    with torch.device("meta"):
        return tied_layers(**more)


def with_skip(**more: Any) -> nn.Module:
    """Its last block reads the output of the first: hidden states alone do not carry that."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            first = x = self.embedding(input_ids)
            for block in self.blocks:
                x = block(x)
            return cross_entropy(self.head(x + first), labels)

    return Skipping()


class Recomputing(nn.Module):
    """Dropout in blocks that the model computes again in backward, from around them, as Hugging Face's do; and a
    parameter of the model's own, used in front of them and behind them."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual(WIDTH, dropout=0.3) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))
        self.again = again

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return cross_entropy(self.head(x * self.scale), labels)


def hugging_face(kind: str) -> Callable[..., nn.Module]:
    def build(**more: Any) -> nn.Module:
        import transformers

        common = {"vocab_size": VOCABULARY, "use_cache": False}
        if kind == "llama":
            shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
            common["vocab_size"] = VOCABULARY + 1  # the model's own tensor plan wants it even
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **shape, num_key_value_heads=2))
        if kind == "gpt2":
            shape = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
            dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **shape, **dropouts))
        shape = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        more_of_opt = {"word_embed_proj_dim": 8, "max_position_embeddings": 32, "dropout": 0.0}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**common, **shape, **more_of_opt))

    return build


MODELS: dict[str, Callable[..., nn.Module]] = {
    "tied_layers": tied_layers,
    "tuples": tuples,
    "sequential": sequential,
    "llama": hugging_face("llama"),
    "gpt2": hugging_face("gpt2"),
    "opt": hugging_face("opt"),
    "skip": with_skip,
    "meta": on_meta,
    "toy": lambda: toy_model(num_blocks=4, width=16, num_heads=2),
    "stored": lambda: Recomputing(again=False),
    "recomputed": lambda: Recomputing(again=True),
    "dropout": lambda: toy_model(num_blocks=4, width=16, num_heads=2, dropout=0.2),
}
WITH_LOSS_FN = ("tied_layers", "tuples", "sequential", "meta")
LENGTHS = (8, 12, 5)
"""Of the sequences in step 1, 2 and 3."""


def seeded(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]()


def batch_of(name: str, step: int, index: int, num_parts: int) -> Any:
    generator = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTHS[step % 3] + 1), generator=generator).chunk(num_parts)[index]
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if name in WITH_LOSS_FN:
        return inputs, targets
    if name in ("llama", "gpt2", "opt"):  # they shift labels themselves
        return {"input_ids": inputs, "labels": inputs}
    return {"input_ids": inputs, "labels": targets}


def config_of(accumulation: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
        "seed": 7,
        **more,
    }


def train(name: str, steps: int = 3, accumulation: int = 4, **config: Any) -> dict[str, Any]:
    """What one rank sees of a few steps, each of another length."""
    loss_fn = cross_entropy if name == "sequential" else None
    model_engine, *_ = engine.initialize(model=seeded(name), config=config_of(accumulation, **config), loss_fn=loss_fn)
    num_parts = accumulation * model_engine.mesh.dp_size
    losses, norms = [], []
    if name == "sequential":  # whole state, by the names of the whole model
        model_engine.module.load_state_dict({key: value.clone() for key, value in seeded(name).state_dict().items()})
    for step in range(steps):
        parts = (
            batch_of(name, step, micro * model_engine.mesh.dp_size + model_engine.mesh.dp_rank, num_parts)
            for micro in range(accumulation)
        )
        losses.append(model_engine.train_batch(parts).item())
        assert model_engine.last_report is not None
        norms.append(model_engine.last_report.grad_norm)
    seen = {
        "losses": losses,
        "norms": norms,
        "pieces": pieces_of(model_engine),
        "whole": {n: p.clone() for n, p in model_engine.full_parameters().items()},
        "names": sorted(n for n, _ in model_engine.module.named_parameters()),
        "left_out": (model_engine.layers_skipped, model_engine.tokens_computed),
    }
    model_engine.destroy()
    return seen


def train_each(jobs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any] | Exception]:
    seen: list[dict[str, Any] | Exception] = []
    for name, config in jobs:
        try:
            seen.append(train(name, **config))
        except engine.EngineError as error:
            seen.append(error)
    return seen
