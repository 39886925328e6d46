"""The example with split layers, from one command on four ranks, and the same run whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.jobs.job import ROOT, column, run, start

STEPS = (
    "training.steps=3",
    "training.eval_interval=3",
    "training.eval_batches=1",
    "training.save_interval=3",
    "model.args.num_hidden_layers=2",
    "data.sequence_length=32",
)


def arguments(output: Path, *more: str) -> list[str]:
    example = ROOT / "examples" / "hf_llama_tp" / "config.json"
    sets = [word for change in (*STEPS, *more) for word in ("--set", change)]
    return ["--config", str(example), "--output", str(output), *sets]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llama_on_four_ranks(tmp_path: Path) -> None:
    split = start([*arguments(tmp_path / "split"), "--nproc", "4"]).finish(timeout=300)
    assert split.code == 0, split.err
    assert "a sample of" in split.out
    whole = start(arguments(tmp_path / "whole", "tensor_parallel.size=1")).finish(timeout=300)
    assert whole.code == 0, whole.err
    assert column(tmp_path / "split", "loss") == pytest.approx(column(tmp_path / "whole", "loss"), abs=1e-4)
    checkpoint, target = tmp_path / "split" / "checkpoints", tmp_path / "llama.safetensors"
    exported = run(["export", str(checkpoint), "--to", str(target)])
    assert exported.code == 0, exported.err

    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = json.loads((ROOT / "examples" / "hf_llama_tp" / "config.json").read_text())["model"]["args"]
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 2}))
    model.load_state_dict(load_file(target), strict=True)
    tokens = torch.arange(8).unsqueeze(0)
    assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss)
