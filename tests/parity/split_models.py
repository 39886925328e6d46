"""Models with a plan, written by hand, of how their layers are split over tp ranks; and what their ranks run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

import engine
from engine.model.tensor_parallel import Split, TensorPlan
from tests.parity.runs import step_through
from tests.parity.small import seeded
from tests.parity.toy import SEQUENCE_LENGTH, VOCABULARY_SIZE, Result, toy_model

COLUMN, ROW, VOCABULARY, HEAD = Split("column"), Split("row"), Split("vocabulary"), Split("head")


def toy_plan(width: int, num_blocks: int, num_heads: int, tp: int, vocabulary: bool = True) -> TensorPlan:
    splits: dict[str, Split] = {}
    for index in range(num_blocks):
        block = f"blocks.{index}"
        splits[f"{block}.attention_in"] = Split("column", segments=(width,) * 3)
        splits[f"{block}.mlp_in"] = COLUMN
        splits[f"{block}.attention_out"] = splits[f"{block}.mlp_out"] = ROW
    if vocabulary:
        splits |= {"token_embedding": VOCABULARY, "head": HEAD}
    return TensorPlan(splits, {f"blocks.{index}.num_heads": num_heads // tp for index in range(num_blocks)})


def toy(
    tp: int, width: int = 64, num_blocks: int = 4, num_heads: int = 4, sequence: bool = False, **changes: Any
) -> nn.Module:
    """``sequence``: norms work on shards of the sequence."""
    model = toy_model(width=width, num_blocks=num_blocks, num_heads=num_heads, **changes)
    plan = toy_plan(width, num_blocks, num_heads, tp)
    norms = [f"blocks.{index}.{name}_norm" for index in range(num_blocks) for name in ("attention", "mlp")]
    model.tensor_plan = replace(plan, sequence=tuple(norms)) if sequence else plan  # type: ignore[assignment]
    return model


class WithLoss(nn.Module):
    """A Hugging Face model whose labels are next tokens already, as the toy batches have them."""

    def __init__(self, inner: nn.Module, plan: TensorPlan) -> None:
        super().__init__()
        self.inner = inner
        self.tensor_plan = TensorPlan(
            {f"inner.{name}": split for name, split in plan.splits.items()},
            {f"inner.{path}": value for path, value in plan.attributes.items()},
            tuple(f"inner.{name}" for name in plan.sequence),
            tuple(f"inner.{name}" for name in plan.summed),
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def llama(tp: int, num_layers: int = 2, tied: bool = False, sequence: bool = False, **changes: Any) -> nn.Module:
    """Grouped-query attention: 8 heads, 4 of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": SEQUENCE_LENGTH,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    splits: dict[str, Split] = {"model.embed_tokens": VOCABULARY, "lm_head": HEAD}
    for index in range(num_layers):
        layer = f"model.layers.{index}"
        splits |= {f"{layer}.self_attn.{name}_proj": COLUMN for name in "qkv"}
        splits |= {f"{layer}.mlp.{name}_proj": COLUMN for name in ("gate", "up")}
        splits |= {f"{layer}.self_attn.o_proj": ROW, f"{layer}.mlp.down_proj": ROW}
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(num_layers) for name in ("input", "post_attention")]
    plan = TensorPlan(splits, sequence=tuple(norms) if sequence else ())
    return WithLoss(seeded(lambda: LlamaForCausalLM(config)), plan)


def qwen3(tp: int, num_layers: int = 2) -> nn.Module:
    """Norms over single heads, whose gradients every tp rank has in part."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=SEQUENCE_LENGTH,
    )
    splits: dict[str, Split] = {"model.embed_tokens": VOCABULARY, "lm_head": HEAD}
    summed = []
    for index in range(num_layers):
        layer = f"model.layers.{index}"
        splits |= {f"{layer}.self_attn.{name}_proj": COLUMN for name in "qkv"}
        splits |= {f"{layer}.mlp.{name}_proj": COLUMN for name in ("gate", "up")}
        splits |= {f"{layer}.self_attn.o_proj": ROW, f"{layer}.mlp.down_proj": ROW}
        summed += [f"{layer}.self_attn.q_norm", f"{layer}.self_attn.k_norm"]
    return WithLoss(seeded(lambda: Qwen3ForCausalLM(config)), TensorPlan(splits, summed=tuple(summed)))


def gpt2(
    tp: int, num_layers: int = 2, width: int = 64, vocabulary_size: int = 257, sequence: bool = False
) -> nn.Module:
    """Fused queries, keys and values in transposed weights; a vocabulary that no number of ranks shares evenly."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary_size,
        n_positions=SEQUENCE_LENGTH,
        n_embd=width,
        n_layer=num_layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    splits: dict[str, Split] = {"transformer.wte": VOCABULARY, "lm_head": HEAD}
    attributes: dict[str, int] = {}
    for index in range(num_layers):
        layer = f"transformer.h.{index}"
        splits[f"{layer}.attn.c_attn"] = Split("column", segments=(width,) * 3, transposed=True)
        splits[f"{layer}.mlp.c_fc"] = Split("column", transposed=True)
        splits |= {f"{layer}.{name}.c_proj": Split("row", transposed=True) for name in ("attn", "mlp")}
        attributes |= {f"{layer}.attn.split_size": width // tp, f"{layer}.attn.num_heads": 4 // tp}
    norms = tuple(f"transformer.h.{i}.ln_{n}" for i in range(num_layers) for n in (1, 2)) if sequence else ()
    return WithLoss(seeded(lambda: GPT2LMHeadModel(config)), TensorPlan(splits, attributes, norms))


MODELS: dict[str, Callable[..., nn.Module]] = {"toy": toy, "llama": llama, "gpt2": gpt2, "qwen3": qwen3}
MODELS |= {
    f"{name}, sequence": functools.partial(make, sequence=True)
    for name, make in (("toy", toy), ("llama", llama), ("gpt2", gpt2))
}


@dataclass
class SplitRun:
    """What a rank saw: ``result`` with whole parameters, the local parameters that all tp ranks should have alike, and
    what `facts` were asked for."""

    result: Result
    copies: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def with_tp(config: dict[str, Any], tp: int) -> dict[str, Any]:
    return {**config, "tensor_parallel": {**config.get("tensor_parallel", {}), "size": tp}}


def train_split(
    model_name: str,
    config: dict[str, Any],
    tp: int,
    steps: int,
    model_arguments: dict[str, Any] | None = None,
    fault: str | None = None,
) -> SplitRun:
    """Run ``steps`` steps of the split model; ``fault`` names one of tests/parity/split_faults.py."""
    model = MODELS[model_name](tp, **(model_arguments or {}))
    if "plan" in config.get("tensor_parallel", {}):
        del model.tensor_plan
    model_engine, *_ = engine.initialize(model=model, config=with_tp(config, tp))
    if fault is not None:
        from tests.parity.split_faults import FAULTS

        FAULTS[fault](model_engine)
    result = step_through(model_engine, steps)
    result.parameters = {name: value.cpu() for name, value in model_engine.full_parameters().items()}
    copies = {
        info.name: parameter.detach().clone()
        for info, parameter in model_engine.parameter_registry.parameters()
        if info.cut is None and not hasattr(parameter, "to_local")
    }
    facts = {"bytes": dict(model_engine.last_report.bytes_by_axis), "tokens": model_engine.global_tokens}  # type: ignore[union-attr]
    model_engine.destroy()
    return SplitRun(result, copies, facts)
