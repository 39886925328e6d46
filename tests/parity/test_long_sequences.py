"""Sequences cut over ranks give what one process gives that sees them whole."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.compare import assert_equal_to
from tests.parity.long_runs import DP, SPLITS, WORLD, one_process, train_slices
from tests.parity.runs import config_of
from tests.parity.tiers import tiers
from tests.parity.toy import GLOBAL_BATCH, SEQUENCE_LENGTH

STEPS = 3
SGD = {"lr": 0.05}
QUICK = {
    ("toy", "sp2", 3, "fp32"),
    ("toy", "cp2", 2, "fp32"),
    ("toy", "dp2-sp2", 1, "bf16"),
    ("toy", "dp2-cp2", 3, "bf16"),
    ("toy", "sp2-cp2", 0, "fp32"),
    ("llama", "sp2", 0, "bf16"),
    ("llama", "cp2", 1, "fp32"),
    ("llama", "dp2-sp2", 2, "fp32"),
    ("llama", "dp2-cp2", 0, "fp32"),
    ("llama", "sp2-cp2", 3, "fp32"),
}
"""Every split with each model, every stage with each precision; the others are for the slow tier and the matrix."""
CELLS = [
    pytest.param(*cell, marks=marks)
    for cell, marks in tiers(list(itertools.product(("toy", "llama"), SPLITS, range(4), ("fp32", "bf16"))), QUICK, 3)
]


@pytest.mark.parametrize(("kind", "split", "stage", "precision"), CELLS)
def test_equal_to_one_process(ranks, row, kind, split, stage, precision):
    """The labels count unevenly, and in one slice none does."""
    row(split, f"stage {stage}", precision)
    num_parts, case = 2 * DP[split], "masked"
    config = config_of(stage=stage, precision=precision, accumulation=2, clip=0.5, **SPLITS[split])
    if precision == "bf16":
        config["optimizer"] = {"type": "SGD", "params": SGD}
    by_rank = ranks(WORLD[split]).run(train_slices, kind, config, case, timeout=300)
    if precision == "fp32":
        expected = one_process(kind, case, steps=STEPS, num_parts=num_parts, clip=0.5)
        assert_equal_to(expected, by_rank)
    else:
        expected = one_process(
            kind, case, steps=STEPS, num_parts=num_parts, clip=0.5, precision=precision, optimizer="SGD", params=SGD
        )
        assert_equal_to(expected, by_rank, losses=1e-3, parameters=1e-3, norms=1e-2)
    for _, _, facts in by_rank:
        assert facts["samples"] == STEPS * GLOBAL_BATCH
        assert facts["tokens"] == STEPS * GLOBAL_BATCH * SEQUENCE_LENGTH


@pytest.mark.parametrize("split", ["sp2", "cp2"])
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("llama", "padded"),
        pytest.param("llama", "packed", marks=pytest.mark.slow),
        ("mistral", "padded"),
        pytest.param("gpt2", "masked", marks=pytest.mark.slow),
        ("bert", "padded"),
    ],
)
def test_masks_of_hugging_face_models(ranks, kind, case, split):
    """Padding, packed documents, windows, and a model that looks to both sides."""
    by_rank = ranks(2).run(train_slices, kind, config_of(stage=1, **SPLITS[split]), case, timeout=300)
    assert_equal_to(one_process(kind, case, steps=STEPS), by_rank)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["sp2", "cp2"])
def test_activation_checkpointing_runs_attention_again(ranks, split):
    config = config_of(stage=1, **SPLITS[split])
    by_rank = ranks(2).run(train_slices, "llama", config, "masked", prepare="checkpointing", timeout=300)
    assert_equal_to(one_process("llama", "masked", steps=STEPS), by_rank)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["sp2", "cp2"])
def test_beside_tensor_parallelism(ranks, split):
    """dp 2 x tp 2 x (sp 2 or cp 2): the axes know nothing of each other."""
    config = config_of(stage=2, clip=0.5, tensor_parallel={"size": 2}, **SPLITS[split])
    expected = one_process("toy", "masked", steps=STEPS, num_parts=2, clip=0.5)
    for found, _, facts in ranks(8).run(train_slices, "toy", config, "masked", timeout=300):
        assert found.losses == pytest.approx(expected.losses, abs=1e-5)
        assert found.norms == pytest.approx(expected.norms, rel=1e-5)
        assert facts["tokens"] == STEPS * GLOBAL_BATCH * SEQUENCE_LENGTH
