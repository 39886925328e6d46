"""The example's model and files."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GPT = load(EXAMPLES / "gpt_text" / "model.py").GPT


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    return GPT(**{"vocabulary_size": 17, "num_blocks": 2, "width": 8, "num_heads": 2, "sequence_length": 12, **options})


def ids(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(1))


def test_no_position_sees_a_later_one() -> None:
    model, tokens = tiny().eval(), ids()
    logits = model(tokens)
    for position in range(12):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 17
        difference = (model(changed) - logits).abs().amax(dim=(0, 2))
        assert bool((difference[:position] == 0).all())
        assert bool((difference[position:] > 0).all())


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model, tokens = tiny(), ids()
    labels = tokens.roll(-1, dims=1)
    log_probabilities = model(tokens).log_softmax(dim=-1)
    expected = -log_probabilities.gather(2, labels[..., None]).mean()
    loss = model(input_ids=tokens, labels=labels)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected)


def test_starts_near_the_uniform_loss_with_a_scaled_residual_stream() -> None:
    torch.manual_seed(0)
    model = GPT(256)
    tokens = torch.randint(0, 256, (4, 128))
    assert model(tokens, tokens.roll(-1, dims=1)).item() == pytest.approx(math.log(256), abs=0.1)
    for block in model.blocks:
        assert block.mlp_in.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for layer in (block.attention_out, block.mlp_out):
            assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * len(model.blocks)), rel=0.05)


@pytest.mark.parametrize("tie", [True, False])
def test_parameter_count(tie: bool) -> None:
    model = GPT(256, tie_embeddings=tie)
    width, blocks = 96, 8
    per_block = 12 * width * width + 13 * width
    embeddings = (256 + 128) * width + (0 if tie else 256 * width)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == blocks * per_block + embeddings + 2 * width
    assert len(model.blocks) >= 8
    assert (model.head.weight is model.token_embedding.weight) == tie


def test_dropout_acts_in_training_only() -> None:
    model, tokens = tiny(dropout=0.5), ids()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_the_config_fits_the_model() -> None:
    config = json.loads((EXAMPLES / "gpt_text" / "config.json").read_text())
    file, name = config["model"]["target"].split(":")
    model = getattr(load(EXAMPLES / "gpt_text" / file), name)(**config["model"]["args"])
    assert model.position_embedding.num_embeddings >= config["data"]["sequence_length"]
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    assert config["scheduler"]["params"]["total_num_steps"] == config["training"]["steps"]
