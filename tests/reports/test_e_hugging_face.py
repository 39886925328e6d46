"""Theme E, export: Hugging Face reads what this engine writes. Tiny configs, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import engine
from engine.checkpoint import export, get_fp32_state_dict
from tests.parity.runs import Pieces, assemble, pieces_of
from tests.parity.small import seeded

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 29}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 29}),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**SIZES, "intermediate_size": 24, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**SIZES, "intermediate_size": 24}),
}
CASES = [("gpt2", 3, "bf16"), ("llama", 2, "bf16"), ("bert", 1, "fp32"), ("llama", 3, "fp32")]


def model_of(kind: str) -> Any:
    config_class, model_class, sizes = MODELS[kind]
    config = getattr(transformers, config_class)(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return seeded(lambda: getattr(transformers, model_class)(config))


def train_and_save(kind: str, stage: int, precision: str, folder: Path) -> Pieces:
    model = model_of(kind)
    for name, parameter in model.named_parameters():
        if ".0." in name and name.endswith("bias"):
            parameter.requires_grad_(False)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }
    model_engine, *_ = engine.initialize(model=model, config=config)
    for step in range(2):
        tokens = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(step))
        model_engine.backward(model_engine(input_ids=tokens, labels=tokens).loss)
        model_engine.step()
    model_engine.save_checkpoint(folder / "checkpoints")
    model_engine.save_16bit_model(folder / "sixteen", "model.safetensors")
    if model_engine.mesh.rank == 0:
        for name in ("whole", "shards", "sixteen"):
            model.config.save_pretrained(folder / name)
    masters = pieces_of(model_engine)
    model_engine.destroy()
    return masters


@pytest.mark.parametrize(("kind", "stage", "precision"), CASES)
def test_from_pretrained_reads_an_export(ranks, tmp_path, kind, stage, precision):
    masters = assemble(ranks(2).run(train_and_save, kind, stage, precision, tmp_path))
    export(tmp_path / "checkpoints", tmp_path / "whole")
    assert len(export(tmp_path / "checkpoints", tmp_path / "shards", max_shard_size="8KB")) > 3
    model_class = getattr(transformers, MODELS[kind][1])
    for name in ("whole", "shards", "sixteen"):
        model, told = model_class.from_pretrained(
            tmp_path / name, output_loading_info=True, dtype="auto" if name == "sixteen" else torch.float32
        )
        assert not any(told.values()), told
        for parameter_name, parameter in model.named_parameters():
            expected = masters[parameter_name]
            if name == "sixteen":
                assert parameter.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
                expected = expected.to(parameter.dtype)
            assert torch.equal(parameter, expected), (name, parameter_name)

    plain = model_of(kind)
    plain.load_state_dict(get_fp32_state_dict(tmp_path / "checkpoints"), strict=True)
    plain.load_state_dict(load_file(tmp_path / "whole" / "model.safetensors"), strict=True)
    assert all(torch.equal(parameter, masters[name]) for name, parameter in plain.named_parameters())
