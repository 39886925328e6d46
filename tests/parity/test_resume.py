"""A run that moves from layout to layout through checkpoints is the run that never stopped."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import engine
from engine.contracts import EngineError
from tests.parity.runs import Pieces, assemble, pieces_of
from tests.parity.small import GLOBAL_BATCH, VOCABULARY_SIZE, config_of, gpt, seeded
from tests.parity.toy import toy_batch

STAGES = range(4)
STEPS_PER_LAYOUT = 2
LAYOUTS = [(0, 1), (3, 2), (1, 3), (2, 2), (3, 3), (0, 2), (3, 1), (2, 3), (1, 2)]
"""(stage, world size) one after the other; 18 steps, 2.6 epochs."""


class Tokens(Dataset[dict[str, Tensor]]):
    """84 samples: 7 steps an epoch."""

    def __init__(self) -> None:
        self.data = toy_batch(0, 7 * GLOBAL_BATCH, VOCABULARY_SIZE)

    def __len__(self) -> int:
        return 7 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.data.items()}


class Scaled(nn.Module):
    """A GPT with what checkpoints may stumble over: tied and frozen parameters, 0-dim ones, a buffer written to."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = gpt(dropout=dropout)
        self.inner.position_embedding.weight.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.offset = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.num_calls: Tensor
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            self.num_calls = self.num_calls + 1  # a new tensor each time
        logits = self.inner(input_ids) * self.temperature + self.offset
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def start(stage: int, **more: Any) -> engine.Engine:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}}
    dropout = more.pop("dropout", 0.0)
    config = config_of(stage, 1, scheduler=schedule, **more)
    model = seeded(functools.partial(Scaled, dropout))
    return engine.initialize(model=model, config=config, training_data=Tokens())[0]


def moments_of(model_engine: engine.Engine) -> Pieces:
    assert model_engine.optimizer is not None
    state = model_engine.optimizer.named_state()
    return [
        (f"{shard.info.name} {key}", shard.info.shape, shard.start, state[shard.info.name][key].reshape(-1).clone())
        for shard in model_engine.roles.reduction.shards  # type: ignore[attr-defined]
        for key in ("exp_avg", "exp_avg_sq")
    ]


def run_part(stage: int, folder: Path | None, steps: int) -> dict[str, Any]:
    """Load from ``folder`` what the last part has left there, go on, save there."""
    model_engine = start(stage)
    client_state = None
    if folder is not None:
        _, client_state = model_engine.load_checkpoint(folder)
    seen: dict[str, Any] = {"client_state": client_state, "losses": [], "lr": []}
    for _ in range(steps):
        seen["losses"].append(model_engine.train_batch().item())
        assert model_engine.last_report is not None
        seen["lr"].append(model_engine.last_report.lr)
    names = ("global_steps", "global_samples", "global_tokens", "micro_steps", "skipped_steps")
    seen["counters"] = {name: getattr(model_engine, name) for name in names}
    seen["num_calls"] = int(model_engine.module.num_calls)
    if folder is not None:
        client = {"stage": stage, "steps": model_engine.global_steps, "tensor": torch.arange(3)}
        model_engine.save_checkpoint(folder, client_state=client)
    seen["parameters"], seen["moments"] = pieces_of(model_engine), moments_of(model_engine)
    model_engine.destroy()
    return seen


def test_a_run_through_all_layouts_never_stopped(ranks, tmp_path):
    steps = STEPS_PER_LAYOUT * len(LAYOUTS)
    (whole,) = ranks(1).run(run_part, 0, None, steps)
    losses: list[float] = []
    rates: list[float] = []
    by_rank: list[dict[str, Any]] = []
    for index, (stage, world) in enumerate(LAYOUTS):
        by_rank = ranks(world).run(run_part, stage, tmp_path, STEPS_PER_LAYOUT)
        losses += by_rank[0]["losses"]
        rates += by_rank[0]["lr"]
        if index == 0:
            assert by_rank[0]["client_state"] is None
        else:
            left = by_rank[-1]["client_state"]
            assert (left["stage"], left["steps"]) == (LAYOUTS[index - 1][0], STEPS_PER_LAYOUT * index)
            assert left["tensor"].tolist() == [0, 1, 2]
    assert losses == pytest.approx(whole["losses"], rel=0, abs=1e-5)
    assert rates == whole["lr"]
    for rank in by_rank:
        assert rank["counters"] == {**whole["counters"], "micro_steps": steps}
        assert rank["num_calls"] == steps
    for what, tolerance in (("parameters", 1e-5), ("moments", 1e-6)):
        expected, found = assemble([whole[what]]), assemble([rank[what] for rank in by_rank])
        assert found.keys() == expected.keys()
        for name in expected:
            assert (found[name] - expected[name]).abs().max() <= tolerance, name


# --- to the bit ----------------------------------------------------------------------------------------------


def digest(model_engine: engine.Engine) -> str:
    found = hashlib.sha256()
    for name, _, _, values in (*pieces_of(model_engine), *moments_of(model_engine)):
        found.update(name.encode() + values.numpy().tobytes())
    return found.hexdigest()


PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "loss_scale_window": 2}}}


def stop_and_go_on(stage: int, folder: Path, precision: str) -> tuple[list[str], list[float]]:
    """Digests and loss scales after 4 steps: at one go, resumed after 2, and by an engine that goes back."""
    more = {"dropout": 0.3, **PRECISIONS[precision]}
    digests, scales = [], []
    model_engine = start(stage, **more)
    for step in range(4):
        if step == 2:
            model_engine.save_checkpoint(folder)
        model_engine.train_batch()
    digests.append(digest(model_engine))
    scales.append(model_engine.loss_scale)
    model_engine.destroy()
    for back in (False, True):
        model_engine = start(stage, **more)
        if back:
            for _ in range(3):
                model_engine.train_batch()
        model_engine.load_checkpoint(folder)
        for _ in range(2):
            model_engine.train_batch()
        digests.append(digest(model_engine))
        scales.append(model_engine.loss_scale)
        model_engine.destroy()
    return digests, scales


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_with_dropout_is_exact(ranks, tmp_path, stage, precision):
    for digests, scales in ranks(2).run(stop_and_go_on, stage, tmp_path, precision):
        assert len(set(digests)) == 1
        assert len(set(scales)) == 1


def go_back_to_the_start(stage: int, folder: Path) -> list[str]:
    """A checkpoint that was saved before the first step has no moments: loading it must forget those there are."""
    model_engine = start(stage)
    model_engine.save_checkpoint(folder)
    digests = []
    for _ in range(2):
        for _ in range(4):
            model_engine.train_batch()
        digests.append(digest(model_engine))
        model_engine.load_checkpoint(folder)
    model_engine.destroy()
    return digests


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_from_before_the_first_step(ranks, tmp_path, stage):
    for first, second in ranks(2).run(go_back_to_the_start, stage, tmp_path):
        assert first == second


def look_then_load(stage: int, folder: Path) -> list[float]:
    """The loss of one batch before training, after it, and after going back: evaluating must not keep old values."""
    model_engine = start(stage, zero_optimization={"stage": stage, "prefetch_bucket_size": 1} if stage == 3 else {})
    batch = toy_batch(5, 6, VOCABULARY_SIZE)
    model_engine.save_checkpoint(folder)
    losses = [model_engine.eval_batch(iter([batch])).item()]
    for _ in range(4):  # the first two have learning rate 0
        model_engine.train_batch()
    losses.append(model_engine.eval_batch(iter([batch])).item())
    model_engine.load_checkpoint(folder)
    losses.append(model_engine.eval_batch(iter([batch])).item())
    model_engine.destroy()
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_evaluating_sees_what_was_loaded(ranks, tmp_path, stage):
    for before, trained, after in ranks(2).run(look_then_load, stage, tmp_path):
        assert after == before
        assert trained != before


def train_around_a_save(folder: Path | None) -> list[float]:
    """At stage 3 with blocks gathered one by one. A save has rank 0 alone ask for the buffers."""
    model_engine = start(3, zero_optimization={"stage": 3, "prefetch_bucket_size": 1})
    model_engine.train_batch()
    model_engine.eval_batch(iter([toy_batch(7, 6, VOCABULARY_SIZE)]))
    if folder is not None:
        model_engine.save_checkpoint(folder)
        if model_engine.mesh.rank == 0:
            model_engine.module.state_dict()
    losses = [model_engine.train_batch().item() for _ in range(2)]
    model_engine.destroy()
    return losses


def test_training_goes_on_after_an_evaluation_and_a_save(ranks, tmp_path):
    assert ranks(2).run(train_around_a_save, tmp_path) == ranks(2).run(train_around_a_save, None)


# --- replicated groups of shards -----------------------------------------------------------------------------

GROUPINGS = {"mics": {"mics_shard_size": 2}, "hpz": {"zero_hpz_partition_size": 2}}


def train_grouped(grouping: str, folder: Path) -> Pieces:
    model_engine = start(3, zero_optimization={"stage": 3, "prefetch_bucket_size": 1, **GROUPINGS[grouping]})
    for _ in range(3):
        model_engine.train_batch()
    model_engine.save_checkpoint(folder)
    pieces = pieces_of(model_engine) + moments_of(model_engine)
    model_engine.destroy()
    return pieces


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_replicas_of_shards_are_saved_once(ranks, tmp_path, grouping):
    saved = assemble(ranks(4).run(train_grouped, grouping, tmp_path))
    (alone,) = ranks(1).run(run_part, 0, tmp_path, 0)
    loaded = assemble([alone["parameters"] + alone["moments"]])
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


# --- another optimizer ---------------------------------------------------------------------------------------


def load_with_another_optimizer(folder: Path) -> str:
    model_engine = start(1)
    model_engine.train_batch()
    model_engine.save_checkpoint(folder)
    model_engine.destroy()
    other = start(1, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    try:
        other.load_checkpoint(folder)
    except EngineError as error:
        return str(error)
    finally:
        other.destroy()
    return "accepted"


def test_the_state_of_another_optimizer_is_refused(ranks, tmp_path):
    for message in ranks(2).run(load_with_another_optimizer, tmp_path):
        assert "AdamW" in message
        assert "SGD" in message
        assert "load_optimizer_states=False" in message


# --- the loader, where windows are discarded -----------------------------------------------------------------


def discard_in_mid_epoch(discards: bool) -> list[float]:
    model_engine = start(1)
    losses = [model_engine.train_batch().item()]
    if discards:
        model_engine.backward(model_engine(**toy_batch(9, 6, VOCABULARY_SIZE)))
        model_engine.flush(discard=True)
    losses += [model_engine.train_batch().item() for _ in range(2)]
    model_engine.destroy()
    return losses


def test_discarding_a_window_leaves_the_data_where_they_are(ranks):
    assert ranks(2).run(discard_in_mid_epoch, True) == ranks(2).run(discard_in_mid_epoch, False)
