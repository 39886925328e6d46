"""What a run loads: the parts of a feature that its config switches off stay out of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

PARTS = {
    "tensor_parallel": ("engine.model.tensor_parallel", "engine.collectives.activations", "engine.mpu"),
    "sequence_parallel_size": ("engine.model.sequence_parallel",),
    "random_ltd": ("engine.model.token_drop", "engine.model.token_layout", "engine.model.token_probe"),
    "progressive_layer_drop": ("engine.model.layer_drop",),
    "more than one of these": ("engine.model.hidden_state", "engine.model.replacement"),
    "pipeline": ("engine.model.pipeline",),
    "ptrain plan": (
        "engine.model.describe",
        "engine.model.measure",
        "engine.model.imagined_splits",
        "engine.plan.forecast",
        "engine.plan.capacity",
        "engine.plan.propose",
    ),
}
"""Feature or command -> the modules that are its own."""

TRAIN = """
import sys, torch, engine
config = {{"train_batch_size": 2, "optimizer": {{"type": "AdamW"}}, **{more}}}
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
trained = engine.initialize(model=model, config=config)[0]
trained.backward(trained(torch.ones(2, 2)).mean())
trained.step()
print("\\n".join(sys.modules))
"""


def loaded(more: dict[str, object]) -> list[str]:
    """The modules of a fresh process after one step of a toy run with ``more`` in its config."""
    code = TRAIN.format(more=more)
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()


def of_parts(modules: list[str], parts: tuple[str, ...]) -> list[str]:
    return [name for name in modules if any(name == part or name.startswith(f"{part}.") for part in parts)]


def test_what_is_off_is_not_loaded() -> None:
    modules = loaded({})
    assert not {feature: found for feature, parts in PARTS.items() if (found := of_parts(modules, parts))}


def test_what_is_on_is_loaded() -> None:
    modules = loaded({"progressive_layer_drop": {"enabled": True, "theta": 0.5}})
    assert of_parts(modules, PARTS["progressive_layer_drop"])
    assert not of_parts(modules, PARTS["tensor_parallel"])


@pytest.mark.parametrize("part", [part for parts in PARTS.values() for part in parts])
def test_the_parts_are_there(part: str) -> None:
    path = REPOSITORY / part.replace(".", "/")
    assert path.is_dir() or path.with_suffix(".py").is_file()
