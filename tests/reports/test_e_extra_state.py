"""Theme E: what modules keep beside parameters and buffers, as torch's extra state, is saved too (FP8 layers do)."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.checkpoint import CheckpointError, get_fp32_state_dict
from engine.checkpoint.deepspeed import import_checkpoint
from tests.parity.small import config_of, seeded
from tests.reports.deepspeed_checkpoint import TAG, Toy
from tests.reports.test_e_import import FIXTURES

VALUES: dict[str, Any] = {
    "a number": 3,
    "nothing": None,
    "a tensor": torch.arange(4, dtype=torch.uint8),
    "a scalar and an empty tensor": [torch.tensor(2.5), torch.zeros(0, 3)],
    "16 bit": torch.tensor([1.5], dtype=torch.bfloat16),
    "nested": {"amax": {"forward": (torch.ones(2), 1), 3: math.inf}, "recipe": ["e4m3", True, -0.0]},
}


class Layer(nn.Linear):
    value: Any = 0

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(4, 4), nn.Linear(4, 4), Layer(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def start(model: nn.Module) -> engine.Engine:
    return engine.initialize(model=model, config=config_of(0, 1))[0]


def same(found: Any, expected: Any) -> bool:
    """Also in type: a tuple is no list, a 16-bit tensor no 32-bit one."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize("what", VALUES)
def test_it_comes_back_as_it_was(tmp_path: Path, what: str) -> None:
    model = seeded(Model)
    model.layers[0].value = VALUES[what]
    started = start(model)
    started.save_checkpoint(tmp_path)
    started.destroy()
    for only_module in (False, True):
        again = start(seeded(Model))
        again.load_checkpoint(tmp_path, load_module_only=only_module)
        assert same(again.module.layers[0].value, VALUES[what])
        assert again.module.layers[2].value == 0
        again.destroy()
    plain = Model()
    plain.load_state_dict(get_fp32_state_dict(tmp_path), strict=True)
    assert same(plain.layers[0].value, VALUES[what])


def test_what_cannot_be_saved_is_refused_before_training() -> None:
    model = seeded(Model)
    model.layers[2].value = {"stream": object()}
    with pytest.raises(
        CheckpointError, match=r"extra_state\.layers\.2\._extra_state\.stream: a builtins\.object cannot"
    ):
        start(model)


def test_what_is_on_one_side_only_is_told(tmp_path: Path, caplog: Any) -> None:
    """The first checkpoint is of a model that has none, the second of one that has more."""
    folders = tmp_path / "without", tmp_path / "with"
    plain = nn.Module()
    plain.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    plain.forward = lambda x: x  # type: ignore[method-assign]
    for folder, model in zip(folders, (plain, seeded(Model)), strict=True):
        started = start(model)
        started.save_checkpoint(folder)
        started.destroy()
    caplog.set_level(logging.WARNING)
    model = seeded(Model)
    model.layers[0].value = "kept"
    started = start(model)
    started.load_checkpoint(folders[0])
    assert "left as initialised: extra_state.layers.0._extra_state, extra_state.layers.2._extra_state" in caplog.text
    assert model.layers[0].value == "kept"
    started.destroy()
    caplog.clear()
    less = seeded(Model)
    less.layers[0] = nn.Linear(4, 4)
    started = start(less)
    started.load_checkpoint(folders[1])
    assert "Not restored: 1 saved tensors of 'extra_state'" in caplog.text
    started.destroy()


class Refusing(Layer):
    def set_extra_state(self, state: Any) -> None:
        raise ValueError(f"version {state} is too old")


def test_what_a_module_does_not_take_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    started = start(seeded(Model))
    started.save_checkpoint(tmp_path)
    started.destroy()
    model = seeded(Model)
    model.layers[0] = Refusing(4, 4)
    started = start(model)
    with pytest.raises(
        CheckpointError, match=r"'extra_state' cannot be taken over \(ValueError: version 0 is too old\)"
    ):
        started.load_checkpoint(tmp_path)
    started.destroy()


def test_deepspeeds_comes_along(tmp_path: Path) -> None:
    source = tmp_path / "deepspeed"
    shutil.copytree(FIXTURES / "stage1_fp32", source)
    file = source / TAG / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=False)
    saved["module"] |= {"head._extra_state": {"amax": torch.ones(2)}, "embedding._extra_state": {1, 2}}
    torch.save(saved, file)
    path, notes = import_checkpoint(source, tmp_path / "out")
    (note,) = notes
    assert "extra_state.embedding._extra_state: a builtins.set cannot be kept" in note
    state = get_fp32_state_dict(path)
    assert same(state.pop("head._extra_state"), {"amax": torch.ones(2)})
    Toy().load_state_dict(state, strict=True)
