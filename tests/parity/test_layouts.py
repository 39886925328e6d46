"""Any layout to any layout: saved once under each, loaded under every other, and the run goes on as if never stopped.

`pytest tests/parity/test_layouts.py --result-file FILE` writes the pairs and their verdicts.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import engine
from tests.parity.runs import Pieces, assemble, pieces_of
from tests.parity.small import GLOBAL_BATCH, VOCABULARY_SIZE, config_of, gpt, seeded
from tests.parity.test_resume import moments_of
from tests.parity.tiers import tiers
from tests.parity.toy import toy_batch

SAVED_AT, MORE_STEPS = 3, 2
"""Steps before the save, in the middle of an epoch of 7, and after it."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    f"stage{stage}x{world}": (world, {"stage": stage}) for stage in range(4) for world in (1, 2, 3, 4)
}
LAYOUTS |= {
    "mics2of4": (4, {"stage": 3, "mics_shard_size": 2}),
    "hpz2of4": (4, {"stage": 3, "zero_hpz_partition_size": 2}),
}
"""Name -> ranks and `zero_optimization`. "mics": two replicas of a model that is cut in two (HSDP)."""

QUICK = [
    ("stage0x1", "stage3x4"),
    ("stage0x2", "mics2of4"),
    ("stage1x3", "stage2x2"),
    ("stage1x4", "stage0x1"),
    ("stage2x2", "stage3x3"),
    ("stage2x4", "stage1x3"),
    ("stage3x2", "stage2x4"),
    ("stage3x3", "stage0x2"),
    ("stage3x4", "stage1x1"),
    ("mics2of4", "stage3x2"),
    ("mics2of4", "stage2x3"),
    ("hpz2of4", "mics2of4"),
    ("pp2", "stage0x1"),
    ("stage2x2", "pp2x2sharded"),
    ("pp2x2sharded", "pp3"),
    ("pp3", "pp2x2"),
    ("pp2x2", "stage3x2"),
    ("stage3x4", "pp2"),
]


PIPELINES: dict[str, dict[str, Any]] = {
    "pp2": {"stages": 2},
    "pp3": {"stages": 3, "schedule": "gpipe"},
    "pp2x2": {"stages": 2, "schedule": "zero_bubble"},
    "pp2x2sharded": {"stages": 2, "partition": [1, 2]},
}
LAYOUTS |= {
    "pp2": (2, {"stage": 0}),
    "pp3": (3, {"stage": 0}),
    "pp2x2": (4, {"stage": 1}),
    "pp2x2sharded": (4, {"stage": 3}),
}
"""Pipelines, "x2": each stage on two data-parallel ranks."""
PAIRS = [(saved, loaded) for saved in LAYOUTS for loaded in LAYOUTS]


class Numbered(Dataset[dict[str, Tensor]]):
    """84 samples, 7 steps an epoch; each carries its number, and what was asked for is kept."""

    def __init__(self) -> None:
        self.data = toy_batch(0, 7 * GLOBAL_BATCH, VOCABULARY_SIZE)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 7 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return {key: value[index] for key, value in self.data.items()}


class Recording(nn.LayerNorm):
    """Counts its calls in attributes, which no checkpoint sees, and tells them as torch's extra state."""

    count = 0
    history = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.history = torch.tensor([self.count, -self.count], dtype=torch.float32)
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history, "of": ("layer", 1)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["of"] == ("layer", 1)
        self.count, self.history = state["count"], state["history"]


class Stumbling(nn.Module):
    """Tied and frozen parameters, a 0-dim and an empty one, one row (fewer than ranks), buffers of two kinds, and what
    is neither: of a layer, and of the model's end."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt(num_blocks=3)
        self.inner.position_embedding.weight.requires_grad_(False)
        self.inner.blocks[1].mlp_norm = Recording(self.inner.norm.normalized_shape)
        self.inner.norm = Recording(self.inner.norm.normalized_shape)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1, 1))
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.num_calls: Tensor
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(VOCABULARY_SIZE))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner(input_ids) * self.temperature + self.shift + self.nothing.sum()
        if self.training:
            self.num_calls += 1
            self.mean.mul_(0.5).add_(0.5)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def start(layout: str) -> tuple[engine.Engine, Numbered]:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}}
    world, zero = LAYOUTS[layout]
    accumulation = 2 if world == 2 or layout in PIPELINES else 1
    config = config_of(zero["stage"], accumulation, scheduler=schedule)
    if layout in PIPELINES:
        config["pipeline"] = PIPELINES[layout]
    config["zero_optimization"] = {**zero, "stage3_prefetch_bucket_size": 1}
    data = Numbered()
    return engine.initialize(model=seeded(Stumbling), config=config, training_data=data)[0], data


def state_of(model_engine: engine.Engine) -> dict[str, Any]:
    assert model_engine.optimizer is not None
    state = model_engine.optimizer.named_state()
    return {
        "parameters": pieces_of(model_engine),
        "moments": moments_of(model_engine),
        "counts": {name: float(entry["step"]) for name, entry in state.items()},
        "buffers": {name: buffer.clone() for name, buffer in model_engine.module.named_buffers() if name != "scratch"},
        "extra": {
            name: module.get_extra_state()
            for name, module in model_engine.module.named_modules()
            if isinstance(module, Recording)
        },
        "lr": model_engine.get_lr(),
        "counters": (model_engine.global_steps, model_engine.global_samples, model_engine.global_tokens),
    }


def go_on(model_engine: engine.Engine, data: Numbered, steps: int) -> tuple[list[float], list[list[int]]]:
    """Losses and, of each step, the samples that this rank took."""
    losses, samples = [], []
    for _ in range(steps):
        data.asked.clear()
        losses.append(model_engine.train_batch().item())
        samples.append(sorted(data.asked))
    return losses, samples


def save_once(layout: str, folder: Path) -> dict[str, Any]:
    model_engine, data = start(layout)
    go_on(model_engine, data, SAVED_AT)
    model_engine.save_checkpoint(folder, tag=layout)
    saved = state_of(model_engine)
    saved["losses"], saved["samples"] = go_on(model_engine, data, MORE_STEPS)
    model_engine.destroy()
    return saved


def load_and_go_on(layout: str, folder: Path, tag: str) -> dict[str, Any]:
    model_engine, data = start(layout)
    path, _ = model_engine.load_checkpoint(folder, tag)
    assert path == str(folder / tag)
    loaded = state_of(model_engine)
    loaded["losses"], loaded["samples"] = go_on(model_engine, data, MORE_STEPS)
    model_engine.destroy()
    return loaded


def whole(by_rank: list[dict[str, Any]], what: str) -> dict[str, Tensor]:
    pieces: list[Pieces] = [rank[what] for rank in by_rank]
    return assemble(pieces)


def samples_of(by_rank: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each step, over all ranks. The loader reads ahead of no step without workers."""
    return [sorted(set().union(*(rank["samples"][step] for rank in by_rank))) for step in range(MORE_STEPS)]


@pytest.fixture(scope="module")
def saved_under(ranks, tmp_path_factory):
    """``saved_under(layout)``: the folder, and what every rank held when it saved and did afterwards."""
    folder = tmp_path_factory.mktemp("layouts")

    @functools.cache
    def get(layout: str) -> tuple[Path, list[dict[str, Any]]]:
        return folder, ranks(LAYOUTS[layout][0]).run(save_once, layout, folder)

    return get


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(*pair, id="-to-".join(pair), marks=marks) for pair, marks in tiers(PAIRS, QUICK, slow_of=13)],
)
def test_layout_to_layout(ranks, saved_under, saved, loaded):
    folder, before = saved_under(saved)
    after = ranks(LAYOUTS[loaded][0]).run(load_and_go_on, loaded, folder, saved)
    for what in ("parameters", "moments"):
        expected, found = whole(before, what), whole(after, what)
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])], what
    counts = {name: count for rank in before for name, count in rank["counts"].items()}
    for rank in after:
        assert rank["counts"].items() <= counts.items()
        assert rank["buffers"].keys() == before[0]["buffers"].keys()
        for name, buffer in before[-1]["buffers"].items():  # the last stage's forward runs through
            assert torch.equal(rank["buffers"][name], buffer), name
        for name, extra in rank["extra"].items():
            count = max(each["extra"][name]["count"] for each in before if name in each["extra"])
            assert count > 0
            assert extra["count"] == count
            assert extra["history"].tolist() == [count, -count]
        assert (rank["lr"], rank["counters"]) == (before[0]["lr"], before[0]["counters"])
        assert rank["losses"] == pytest.approx(before[0]["losses"], rel=0, abs=1e-6)
    assert set().union(*(rank["extra"] for rank in after)) == {"inner.blocks.1.mlp_norm", "inner.norm"}
    assert samples_of(after) == samples_of(before)
    assert [len(step) for step in samples_of(after)] == [GLOBAL_BATCH] * MORE_STEPS
