"""What a checkpoint says of the model beside its tensors: which parameters were frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.json_values import decode
from engine.checkpoint.manifest import Manifest
from engine.contracts import OnLayoutChange, SavedLayout

NAME = "model"


class ModelFacts:
    """A Stateful that only tells: a load takes nothing from it."""

    name = NAME
    on_layout_change: OnLayoutChange = "reshard"

    def __init__(self, frozen: Sequence[str]) -> None:
        self._frozen = list(frozen)

    def state(self) -> dict[str, Any]:
        return {"frozen": self._frozen}

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None: ...


def frozen_names(manifest: Manifest) -> set[str]:
    """The parameters that were frozen. Raises `CheckpointError` where the checkpoint does not say."""
    if NAME not in manifest.states:
        raise CheckpointError(f"{manifest.path} does not say which parameters were frozen; export them all.")
    return set(decode(manifest.states[NAME].values[0], f"states.{NAME}")["frozen"])
