"""What a run on slices refuses, by name and alike on all ranks; and what goes on as it does on whole sequences."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import engine
from engine.checkpoint.errors import CheckpointError
from tests.parity import long_models
from tests.parity.long_models import ReturnsLogits, ReturnsSum, build
from tests.parity.long_runs import SPLITS, model_of, shown, train_slices
from tests.parity.runs import assemble, config_of, pieces_of
from tests.parity.toy import part, toy_batch

REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "positions": ("WithoutPositions", {}, "sp2", "forward of WithoutPositions takes no position_ids"),
    "own positions": ("CountsItsOwnPositions", {}, "sp2", "gives something else on slices than on whole sequences"),
    "shifted labels": ("ShiftsLabels", {}, "sp2", "the loss at the borders of slices is"),
    "convolution": ("WithConvolution", {}, "sp2", "short (Conv1d) looks along the sequence"),
    "look back": ("LooksBack", {}, "cp2", "gives something else on slices than on whole sequences"),
    "attention by hand": (
        "HandmadeAttention",
        {},
        "sp2",
        "blocks.0, blocks.1 (HandmadeBlock) made no call of torch.nn",
    ),
    "own mask": ("MakesItsMask", {}, "cp2", "attention mask of shape (1, 1, 16, 16) for a slice of 16 of 32 tokens"),
    "heads": ("GPT", {"num_heads": 1}, "sp2", "2 ranks cannot share the 1 attention heads: 1 = 0 x 2 + 1; set 1, or"),
    "unknown heads": ("HidesItsHeads", {}, "sp2", "2 does not divide the 1 attention heads: 1 = 0 x 2 + 1"),
    "dropout in a ring": ("GPT", {"dropout": 0.1}, "cp2", "attention dropout 0.1 cannot be right in a ring"),
    "no loss": ("ReturnsLogits", {}, "sp2", "no loss, so targets outside the model would not fit"),
}


def refusals() -> dict[str, str]:
    return {name: _refusal(*case[:3]) for name, case in REFUSED.items()} | {
        "odd length": _refusal("GPT", {}, "sp2", {key: value[:, :31] for key, value in toy_batch(0, 2).items()}),
        "labels of sequences": _refusal("GPT", {}, "sp2", {**toy_batch(0, 2), "labels": torch.zeros(2).long()}),
    }


def _refusal(kind: str, changes: dict[str, Any], split: str, batch: dict[str, Tensor] | None = None) -> str:
    model, started = build(getattr(long_models, kind), **changes), None
    batch = batch or toy_batch(0, 2)
    if kind == "ReturnsLogits":
        del batch["labels"]
    try:
        started, *_ = engine.initialize(model=model, config=config_of(stage=0, **SPLITS[split]))
        started.backward(started(**batch))
    except engine.EngineError as error:
        return str(error)
    finally:
        if started is not None:
            started.destroy()
    return ""


def test_refused_by_name(ranks):
    by_rank = ranks(2).run(refusals)
    assert by_rank[0] == by_rank[1]
    expected = {name: case[3] for name, case in REFUSED.items()}
    expected["odd length"] = "31 = 15 x 2 + 1; the nearest lengths that fit are 30 and 32"
    expected["labels of sequences"] = "labels (a tensor of shape (2,)) does not run along the sequence"
    for name, words in expected.items():
        assert words in by_rank[0][name], f"{name}: {by_rank[0][name]!r}"


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def other_losses(split: str) -> dict[str, Any]:
    """Losses of two steps and one evaluation, by how the loss is told; and the module called directly."""
    batches = [shown("masked", toy_batch(step, 12), step) for step in range(3)]
    pairs = [(batch["input_ids"], batch["labels"]) for batch in batches]
    found: dict[str, Any] = {}
    config = config_of(stage=1, **SPLITS[split])
    config["train_batch_size"] = 12
    outside, *_ = engine.initialize(model=build(ReturnsLogits), config=config, loss_fn=loss_fn)
    found["loss_fn"] = [outside.train_batch(iter(pairs[:1])).item(), outside.train_batch(iter(pairs[1:2])).item()]
    found["loss_fn"].append(outside.eval_batch(iter(pairs[2:])).item())
    found["module"] = outside.module(pairs[2][0]).detach()
    outside.destroy()
    inside, *_ = engine.initialize(model=build(ReturnsSum), config=config)
    found["sum"] = [inside.train_batch(iter(batches[:1])).item(), inside.train_batch(iter(batches[1:2])).item()]
    found["sum"].append(inside.eval_batch(iter(batches[2:])).item())
    inside.destroy()
    return found


@pytest.mark.parametrize("split", ["sp2", "cp2"])
def test_losses_outside_the_model_and_sums(ranks, split):
    (expected,) = ranks(1).run(whole_losses)
    for found in ranks(2).run(other_losses, split):
        assert found["loss_fn"] == pytest.approx(expected["loss_fn"], abs=1e-5)
        assert found["sum"] == pytest.approx(expected["sum"], abs=1e-5)
        assert (found["module"] - expected["module"]).abs().max() < 1e-4, "a direct call sees whole sequences"


def whole_losses() -> dict[str, Any]:
    SPLITS["whole"] = {}
    return other_losses("whole")


def drawn() -> float:
    model = build(long_models.NotesRandomNumbers)
    started, *_ = engine.initialize(model=model, config=config_of(stage=0, **SPLITS["sp2"]))
    started(**part(toy_batch(0), started.mesh.dp_rank, started.mesh.dp_size))
    started.destroy()
    return model.drawn


def test_slices_draw_their_own_random_numbers(ranks):
    assert len(set(ranks(4).run(drawn))) == 4


def left_behind() -> dict[str, Any]:
    """Of a model whose engine is destroyed, and of one that is dropped with its engine."""
    model = model_of("llama", attn_implementation="eager")
    started, *_ = engine.initialize(model=model, config=config_of(stage=0, **SPLITS["sp2"]))
    started(**toy_batch(0, 2))
    started.destroy()
    found = {
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "attention": model.config._attn_implementation,
    }
    dropped = model_of("llama")
    started, *_ = engine.initialize(model=dropped, config=config_of(stage=0, **SPLITS["sp2"]))
    started(**toy_batch(0, 2))
    left = weakref.ref(dropped)
    del started, dropped, _
    gc.collect()
    return {**found, "is there": left() is not None}


def test_nothing_is_left_behind(ranks):
    assert ranks(2).run(left_behind) == [{"forwards": [], "attention": "eager", "is there": False}] * 2


def curriculum(split: str) -> list[float]:
    schedule = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8}}
    section = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32, **schedule}
    config = config_of(stage=2, curriculum_learning=section, **SPLITS[split] if split != "whole" else {})
    started, *_ = engine.initialize(model=model_of("toy"), config=config)
    losses = [started.train_batch(iter([toy_batch(step)])).item() for step in range(3)]
    losses.append(float(started.global_tokens))
    started.destroy()
    return losses


@pytest.mark.parametrize("split", ["sp2", "cp2"])
def test_a_curriculum_cuts_before_sequences_are_sliced(ranks, split):
    (expected,) = ranks(1).run(curriculum, "whole")
    for found in ranks(2).run(curriculum, split):
        assert found == pytest.approx(expected, abs=1e-5)


def save(folder: str, split: str, stage: int) -> Any:
    config = config_of(stage=stage, **SPLITS[split])
    started, *_ = engine.initialize(model=model_of("toy"), config=config)
    started.train_batch(iter([toy_batch(0)]))
    started.save_checkpoint(folder)
    started.train_batch(iter([toy_batch(1)]))
    pieces = pieces_of(started)
    started.destroy()
    return pieces


def resume(folder: str, split: str | None, stage: int) -> Any:
    config = config_of(stage=stage, **(SPLITS[split] if split else {}))
    started, *_ = engine.initialize(model=model_of("toy"), config=config)
    path, _ = started.load_checkpoint(folder)
    if path is None:
        raise CheckpointError("nothing was loaded")
    started.train_batch(iter([toy_batch(1)]))
    pieces = pieces_of(started)
    started.destroy()
    return pieces


@pytest.mark.parametrize(("split", "stage"), [("sp2", 2), pytest.param("cp2", 0, marks=pytest.mark.slow)])
def test_checkpoints_know_nothing_of_slices(ranks, tmp_path, split, stage):
    expected = assemble(ranks(2).run(save, str(tmp_path), split, stage))
    for world, other, other_stage in ((1, None, 0), (2, "cp2", 3)):
        found = assemble(ranks(world).run(resume, str(tmp_path), other, other_stage))
        for name, values in expected.items():
            assert (found[name] - values).abs().max() < 1e-5, f"{name} after loading at {other or 'one process'}"


def bytes_of(split: str) -> dict[tuple[str, str], int]:
    config = config_of(stage=0, **SPLITS[split])
    _, _, facts = train_slices("toy", config, steps=1)
    return facts["bytes"]


def test_bytes_of_attention_are_counted(ranks):
    """Per layer and direction, sp: 3 slices of the hidden state out and 1 back; cp: keys and values, and in backward
    their gradients in fp32, once more around."""
    hidden = 24 * 32 * 64 * 4  # bytes of a hidden state, whole
    (by_operation, _) = ranks(2).run(bytes_of, "sp2")
    assert by_operation["sp", "all_to_all"] == 4 * 2 * (3 + 1) * hidden // 2 // 2
    (by_operation, _) = ranks(2).run(bytes_of, "cp2")
    assert by_operation["cp", "send"] == 4 * (1 + 1 + 2) * 2 * hidden // 2
