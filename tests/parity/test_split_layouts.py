"""Any layout to any layout across tp too: saved under each, loaded under others, and the run goes on as if never
stopped. The checkpoint has names and shapes of the user's model, whatever parts the ranks wrote."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint.export import get_fp32_state_dict
from engine.checkpoint.reader import CheckpointReader, open_checkpoint
from tests.parity.split_small import Gated, go_on, start
from tests.parity.tiers import tiers

SAVED_AT, MORE_STEPS = 2, 2

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage0x1": (1, 1, {"stage": 0}),
    "stage2x4": (4, 1, {"stage": 2}),
    "stage3x2": (2, 1, {"stage": 3}),
    "stage0xtp2": (2, 2, {"stage": 0}),
    "stage1xdp2xtp2": (4, 2, {"stage": 1}),
    "stage2xdp2xtp2": (4, 2, {"stage": 2}),
    "stage3xdp2xtp2": (4, 2, {"stage": 3}),
    "stage0xtp4": (4, 4, {"stage": 0}),
    "stage1xtp3": (3, 3, {"stage": 1}),
}
"""Name -> ranks, tp and `zero_optimization`. 21 rows of the vocabulary are 11 and 10, 7 each, or 6, 6, 6 and 3."""
STAGED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage0xpp2xtp2": (4, 2, {"stage": 0}),
    "stage3xpp2xdp2xtp2": (8, 2, {"stage": 3}),
}
"""In two pipeline stages of one block each."""
LAYOUTS |= STAGED

QUICK = [
    ("stage0x1", "stage3xdp2xtp2"),
    ("stage3xdp2xtp2", "stage0xtp4"),
    ("stage0xtp4", "stage2xdp2xtp2"),
    ("stage2xdp2xtp2", "stage3x2"),
    ("stage3x2", "stage1xtp3"),
    ("stage1xtp3", "stage1xdp2xtp2"),
    ("stage1xdp2xtp2", "stage0x1"),
    ("stage0xpp2xtp2", "stage2xdp2xtp2"),
]
EIGHT_RANKS = [("stage0xtp4", "stage3xpp2xdp2xtp2"), ("stage3xpp2xdp2xtp2", "stage0xpp2xtp2")]
PAIRS = [(saved, loaded) for saved in LAYOUTS for loaded in LAYOUTS if LAYOUTS[saved][1] * LAYOUTS[loaded][1] > 1]


def whole_state(model_engine: Any) -> dict[str, Any]:
    return {
        "parameters": model_engine.full_parameters(),
        "exp_avg": model_engine.full_optimizer_states(key="exp_avg"),
        "exp_avg_sq": model_engine.full_optimizer_states(key="exp_avg_sq"),
        "step": model_engine.full_optimizer_states(key="step"),
        "counters": (model_engine.global_steps, model_engine.global_samples, model_engine.global_tokens),
        "calls": model_engine.module.num_calls.clone(),
    }


def begin(layout: str) -> Any:
    _, tp, zero = LAYOUTS[layout]
    staged: dict[str, Any] = {"pipeline": {"stages": 2}, "accumulation": 2} if layout in STAGED else {}
    return start(tp, zero["stage"], zero=zero, **staged)


def save_once(layout: str, folder: Path) -> dict[str, Any]:
    model_engine = begin(layout)
    go_on(model_engine, SAVED_AT)
    model_engine.save_checkpoint(folder, tag=layout)
    saved = whole_state(model_engine)
    saved["losses"] = go_on(model_engine, MORE_STEPS, first=SAVED_AT).losses
    model_engine.destroy()
    return saved


def load_and_go_on(layout: str, folder: Path, tag: str) -> dict[str, Any]:
    model_engine = begin(layout)
    path, _ = model_engine.load_checkpoint(folder, tag)
    assert path == str(folder / tag)
    loaded = whole_state(model_engine)
    loaded["losses"] = go_on(model_engine, MORE_STEPS, first=SAVED_AT).losses
    model_engine.destroy()
    return loaded


@pytest.fixture(scope="module")
def saved_under(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")

    @functools.cache
    def get(layout: str) -> tuple[Path, dict[str, Any]]:
        return folder, ranks(LAYOUTS[layout][0]).run(save_once, layout, folder, timeout=180)[0]

    return get


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(*pair, id=f"{pair[0]}-to-{pair[1]}", marks=marks)
        for pair, marks in tiers(PAIRS, QUICK, slow_of=3, first_slow=EIGHT_RANKS)
    ],
)
def test_layout_to_layout(ranks, saved_under, saved, loaded):
    folder, before = saved_under(saved)
    for after in ranks(LAYOUTS[loaded][0]).run(load_and_go_on, loaded, folder, saved, timeout=180):
        for what in ("parameters", "exp_avg", "exp_avg_sq", "step"):
            assert after[what].keys() == before[what].keys()
            assert not [name for name, value in before[what].items() if not torch.equal(after[what][name], value)], what
        assert after["counters"] == before["counters"]
        assert torch.equal(after["calls"], before["calls"])
        assert after["losses"] == pytest.approx(before["losses"], rel=0, abs=1e-6)


def test_the_files_speak_of_the_users_model(saved_under):
    folder, before = saved_under("stage1xdp2xtp2")
    manifest = open_checkpoint(folder, "stage1xdp2xtp2")
    model = Gated()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    saved = {name.removeprefix("parameters."): t for name, t in manifest.tensors.items() if "parameters." in name}
    assert {name: t.shape for name, t in saved.items()} == shapes
    with CheckpointReader(manifest) as reader:
        read: dict[str, Tensor] = {name: reader.read(f"parameters.{name}") for name in shapes}
    assert all(torch.equal(read[name], before["parameters"][name]) for name in shapes)
    model.load_state_dict(get_fp32_state_dict(folder, "stage1xdp2xtp2"), strict=False)
    assert all(torch.equal(p, before["parameters"][name]) for name, p in model.named_parameters())
