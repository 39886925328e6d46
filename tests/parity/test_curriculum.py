"""Training under a curriculum equals a plain loop that cuts its batches by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import engine
from engine.contracts import EngineError
from tests.parity.compare import assert_equal_to
from tests.parity.runs import Pieces, config_of, train
from tests.parity.toy import DTYPES, SEQUENCE_LENGTH, VOCABULARY_SIZE, Result, reference_run, toy_batch, toy_model

WORLD = 2
STEPS = 6
SMALL = {"num_blocks": 2, "width": 32, "num_heads": 2}
LENGTHS = [8, 16, 24, 32, 32, 32]
PIECES = [8, 16, 16, 32, 32, 32]
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def curriculum(kind: str = "seqlen", low: int = 8, high: int = 32, steps: int = 4, **more: Any) -> dict[str, Any]:
    schedule = {"total_curriculum_step": steps, "difficulty_step": 8}
    section = {
        "enabled": True, "curriculum_type": kind, "min_difficulty": low, "max_difficulty": high,
        "schedule_type": "fixed_linear", "schedule_config": schedule, **more,
    }  # fmt: skip
    return {"curriculum_learning": section}


def truncated(batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    return {name: rows[:, : LENGTHS[step]] for name, rows in batch.items()}


def reshaped(batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    return {name: torch.cat([row.view(-1, PIECES[step]) for row in rows]) for name, rows in batch.items()}


SHOWN = {"seqlen": truncated, "seqlen_reshape": reshaped}
CASES = [(kind, stage, precision) for kind in SHOWN for stage in (0, 3) for precision in ("fp32", "bf16")]


def case_config(kind: str, stage: int, precision: str, **more: Any) -> dict[str, Any]:
    optimizer = {} if precision == "fp32" else {"optimizer": SGD}
    return config_of(stage=stage, precision=precision, accumulation=2, **curriculum(kind), **optimizer, **more)


def run_cases() -> list[tuple[Result, Pieces, dict[str, Any]]]:
    return [train(case_config(*case), STEPS, SMALL) for case in CASES]


def test_against_a_loop_that_cuts_by_hand(ranks: Any) -> None:
    by_rank = ranks(WORLD).run(run_cases, timeout=240.0)
    for number, (kind, stage, precision) in enumerate(CASES):
        optimizer: dict[str, Any] = {}
        tolerance: dict[str, float] = {}
        if precision != "fp32":
            optimizer = {"optimizer": SGD["type"], "params": SGD["params"]}
            tolerance = {"losses": 1e-3, "parameters": 2e-3, "norms": 1e-2}
        expected = reference_run(
            num_parts=4, steps=STEPS, precision=precision, model=toy_model(**SMALL), shown=SHOWN[kind], **optimizer
        )
        results = [rank[number] for rank in by_rank]
        assert DTYPES[precision] in (torch.float32, torch.bfloat16)
        try:
            assert_equal_to(expected, results, **tolerance)
        except AssertionError as error:
            raise AssertionError(f"{kind}, stage {stage}, {precision}: {error}") from error


NEUTRAL = {
    "one length from the start": curriculum(low=32, high=32),
    "longer than the sequences": curriculum(low=512, high=1024),
    "pieces as long as the whole": curriculum("seqlen_reshape", low=32, high=32),
}


def run_neutral(stage: int) -> dict[str, tuple[Result, Pieces]]:
    found = {}
    for name, section in {"plain": {}, **NEUTRAL}.items():
        result, pieces, _ = train(config_of(stage=stage, accumulation=2, **section), 4, SMALL)
        found[name] = result, pieces
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_neutral_curriculum_changes_no_bit(ranks: Any, stage: int) -> None:
    for found in ranks(WORLD).run(run_neutral, stage, timeout=120.0):
        plain, pieces = found.pop("plain")
        for name, (result, own) in found.items():
            assert result == plain, name
            assert all(torch.equal(a[3], b[3]) for a, b in zip(own, pieces, strict=True)), name


# --- where the loss is computed, and who cuts -------------------------------------------------------------------


class Logits(nn.Module):
    """Without a loss of its own."""

    def __init__(self, takes_length: bool = False) -> None:
        super().__init__()
        self.inner = toy_model(**SMALL)
        self.lengths: list[int] = []
        if takes_length:
            self.forward = self.forward_with_length  # type: ignore[method-assign]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids)

    def forward_with_length(self, input_ids: Tensor, curriculum_seqlen: int = 0) -> Tensor:
        self.lengths.append(curriculum_seqlen)
        return self.inner(input_ids).mean()


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The batches of `toy_batch`, one after the other; 24 samples a step."""

    def __init__(self, steps: int = STEPS) -> None:
        batches = [toy_batch(step) for step in range(steps)]
        self.inputs = torch.cat([batch["input_ids"] for batch in batches])
        self.labels = torch.cat([batch["labels"] for batch in batches])

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def pairs() -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(STEPS):
        batch = toy_batch(step)
        yield batch["input_ids"], batch["labels"]


def expected_losses(kind: str) -> list[float]:
    model = Logits()
    found = reference_run(steps=STEPS, model=_WithLoss(model), shown=SHOWN[kind])
    return found.losses


class _WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return criterion(self.inner(input_ids), labels)


@pytest.mark.parametrize("kind", SHOWN)
def test_targets_of_a_loss_function_are_cut(kind: str) -> None:
    model_engine, *_ = engine.initialize(
        model=Logits(), config=config_of(stage=0, **curriculum(kind)), loss_fn=criterion
    )
    batches = pairs()
    losses = [float(model_engine.train_batch(batches)) for _ in range(STEPS)]
    assert losses == pytest.approx(expected_losses(kind), abs=1e-5)
    held_out = model_engine.eval_batch(pairs(), 1)
    with torch.no_grad():
        inputs, labels = next(pairs())
        assert float(held_out) == pytest.approx(float(criterion(model_engine.module(inputs), labels)), abs=1e-5)
    model_engine.destroy()


@pytest.mark.parametrize("kind", SHOWN)
def test_the_own_loader_hands_out_whole_batches_cut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop with its own criterion, unchanged."""
    monkeypatch.setattr("engine.data.loader.sample_order", lambda count, seed, epoch: torch.arange(count))
    model_engine, _, loader, _ = engine.initialize(
        model=Logits(), config=config_of(stage=0, **curriculum(kind)), training_data=Samples()
    )
    losses, shapes = [], []
    for inputs, labels in loader:
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
        shapes.append(tuple(inputs.shape))
    assert losses == pytest.approx(expected_losses(kind), abs=1e-5)
    rows = [24 * SEQUENCE_LENGTH // size if kind == "seqlen_reshape" else 24 for size in PIECES]
    lengths = PIECES if kind == "seqlen_reshape" else LENGTHS
    assert shapes == list(zip(rows, lengths, strict=True))
    model_engine.destroy()


def test_a_loop_with_its_own_loader_and_criterion_is_refused_or_cuts_itself() -> None:
    model_engine, *_ = engine.initialize(model=Logits(), config=config_of(stage=0, **curriculum()))
    loader = DataLoader(Samples(), batch_size=24)
    inputs, labels = next(iter(loader))
    with pytest.raises(EngineError, match=r"cut from \(24, 32\) to \(24, 8\).*loss_fn=.*cut_to_curriculum"):
        model_engine(inputs)
    losses = []
    for batch in loader:
        inputs, labels = model_engine.cut_to_curriculum(batch)
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected_losses("seqlen"), abs=1e-5)
    model_engine.eval()
    assert model_engine(inputs).shape == (24, SEQUENCE_LENGTH, VOCABULARY_SIZE)
    model_engine.destroy()


def test_a_model_that_takes_the_length_is_given_it() -> None:
    model = Logits(takes_length=True)
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage=0, **curriculum()))
    for step in range(3):
        model_engine.backward(model_engine(toy_batch(step)["input_ids"]))
        model_engine.step()
    assert model.lengths == LENGTHS[:3]
    model_engine.destroy()


def test_data_without_a_sequence_is_refused_before_training() -> None:
    class Features(Dataset[Any]):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.rand(5), "y": torch.rand(1)}

    with pytest.raises(EngineError, match=r"no sequence dimension \(x: .*, y: .*sequence_keys"):
        engine.initialize(model=Logits(), config=config_of(stage=0, **curriculum()), training_data=Features())
    model_engine, *_ = engine.initialize(model=nn.Linear(5, 1), config=config_of(stage=0, **curriculum()))
    with pytest.raises(EngineError, match=r"no sequence dimension: none of its tensors \(0.0 \(4, 5\)\)"):
        model_engine(torch.rand(4, 5))
    model_engine.destroy()


class Series(nn.Module):
    """A regression over time: nothing in it holds token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return self.layer(x).squeeze(-1)


def test_sequence_keys_name_what_is_cut_by_place() -> None:
    """Inputs (batch, time, 3), targets (batch, time) of a loss function."""
    config = config_of(stage=0, sequence_keys={"0": 1, "1": 1}, **curriculum())
    model = Series()
    model_engine, *_ = engine.initialize(model=model, config=config, loss_fn=F.mse_loss)
    for _ in range(3):
        model_engine.train_batch(iter([(torch.rand(24, 32, 3), torch.rand(24, 32))]))
    assert model.shapes == [(24, length, 3) for length in LENGTHS[:3]]
    assert model_engine.global_tokens == 0
    model_engine.destroy()
