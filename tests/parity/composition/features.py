"""The features whose pairs make the composition matrix, one entry each; `cells` are the pairs.

A feature that the engine gains gets its line here, and with it a cell beside every other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LR = 2e-2
STEPS = 6
"""Steps that are applied. The 1-bit optimizers switch after step 2, and 0/1 Adam's ranks are together after 4 and 6."""
SAVED_AFTER = 4
CLIP = 0.3
GLOBAL_BATCH, SEQUENCE_LENGTH, VOCABULARY_SIZE = 8, 16, 32
NUM_BLOCKS, NUM_HEADS, WIDTH = 4, 4, 16

_RAMP = {"total_curriculum_step": 5, "difficulty_step": 4}
_CUTTING = {
    "enabled": True, "min_difficulty": 8, "max_difficulty": SEQUENCE_LENGTH, "schedule_type": "fixed_linear",
    "schedule_config": _RAMP,
}  # fmt: skip
_KEPT = {"min_value": 4, "max_value": SEQUENCE_LENGTH, "schedule_config": {"require_steps": 5, "seq_per_step": 4}}
_ADAM = {"lr": LR, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1}
_DRAWING = {
    "min_difficulty": 40, "max_difficulty": 100, "difficulty_type": "percentile",
    "clustering_type": "schedule_based", "schedule_type": "fixed_linear", "schedule_config": _RAMP,
}  # fmt: skip
INDEX = "{index}"
"""Where the sampler's index lies; `Cell.config` fills it in."""


@dataclass(frozen=True)
class Feature:
    """``key``: of features with the same key a run has one. ``config``: its sections. ``dp``: ranks that it needs along
    the data-parallel axis to mean something. ``axis``: what it splits over ``degree`` ranks. ``traits``: what a run or
    the oracle must do besides."""

    name: str
    key: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dp: int = 1
    axis: str = ""
    degree: int = 1
    traits: frozenset[str] = frozenset()


def _optimizer(name: str, type_name: str, dp: int = 1, **params: Any) -> Feature:
    return Feature(name, "optimizer", {"optimizer": {"type": type_name, "params": params}}, dp)


def _trait(name: str, key: str, trait: str, **config: Any) -> Feature:
    return Feature(name, key, config, traits=frozenset({trait}))


def _zero(name: str, dp: int = 2, **settings: Any) -> Feature:
    return Feature(name, "sharding", {"zero_optimization": settings}, dp)


PLAIN = Feature("none", "none")
ADAMW = {"type": "AdamW", "params": _ADAM}
SGD = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9, "weight_decay": 0.1}}
"""In 16 bit, where AdamW would make whole steps of what sums in another order differ by."""

FEATURES: tuple[Feature, ...] = (
    _zero("ZeRO 1", stage=1),
    _zero("ZeRO 2", stage=2),
    _zero("ZeRO 3", stage=3),
    _zero("MiCS", dp=4, stage=3, mics_shard_size=2),
    _zero("hpZ", dp=4, stage=3, zero_hpz_partition_size=2),
    _trait(
        "fp16, one overflow",
        "precision",
        "overflow",
        fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1},
    ),
    Feature("bf16", "precision", {"bf16": {"enabled": True}}),
    Feature("accumulation", "accumulation", {"gradient_accumulation_steps": 2}),
    Feature("clipping", "clipping", {"gradient_clipping": CLIP}),
    _trait("recomputed activations", "recomputation", "recomputes"),
    _optimizer("Lamb", "Lamb", lr=LR, betas=[0.9, 0.99], eps=1e-3, weight_decay=0.1),
    _optimizer("Muon", "Muon", lr=LR, weight_decay=0.1, betas=[0.9, 0.99], eps=1e-3),
    _optimizer("Adafactor", "Adafactor", lr=LR, weight_decay=0.1, eps=[1e-2, 1e-3]),
    _optimizer("1-bit Adam", "OneBitAdam", dp=2, freeze_step=2, **_ADAM),
    _optimizer(
        "0/1 Adam", "ZeroOneAdam", dp=2, var_freeze_step=2, var_update_scaler=1, local_step_scaler=2,
        local_step_clipper=2, **_ADAM,
    ),
    _optimizer("1-bit LAMB", "OneBitLamb", dp=2, freeze_step=2, coeff_beta=0.5, **_ADAM),
    Feature("LR schedule", "schedule", {"scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}}),
    _trait(
        "curriculum, cut", "curriculum", "truncates", curriculum_learning={**_CUTTING, "curriculum_type": "seqlen"}
    ),
    _trait(
        "curriculum, reshaped", "curriculum", "reshapes",
        curriculum_learning={**_CUTTING, "curriculum_type": "seqlen_reshape"},
    ),
    _trait("the engine's loader", "data", "loads"),
    _trait(
        "curriculum, sampled",
        "data",
        "loads",
        data_efficiency={
            "data_sampling": {
                "curriculum_learning": {
                    "enabled": True,
                    "data_cluster_path": INDEX,
                    "curriculum_metrics": {"vocabularyrarity": _DRAWING},
                }
            }
        },
    ),
    _trait("train_batch", "loop", "train_batch"),
    _trait(
        "random-LTD", "token drop", "drops tokens",
        data_efficiency={"data_routing": {"random_ltd": {"enabled": True, "random_ltd_schedule": _KEPT}}},
    ),
    _trait(
        "layer drop", "layer drop", "drops layers",
        progressive_layer_drop={"enabled": True, "theta": 0.3, "gamma": 0.5},
    ),
    _trait("saved and resumed", "resume", "resumes"),
    _trait("tied embeddings", "ties", "ties"),
    _trait("frozen parameters", "frozen", "freezes"),
    Feature("tp 2", "tp", {"tensor_parallel": {"size": 2}}, axis="tp", degree=2),
    Feature("sp 2", "sp", {"sequence_parallel_size": 2}, axis="sp", degree=2),
    Feature("cp 2", "cp", {"parallel": {"context_parallel": 2}}, axis="cp", degree=2),
    Feature(
        "pp 2", "pp", {"pipeline": {"stages": 2}}, axis="pp", degree=2, traits=frozenset({"train_batch"})
    ),
)  # fmt: skip
FROZEN = ("blocks.0.", "position_embedding")
ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")


@dataclass(frozen=True)
class Cell:
    """A run with both features. The other settings are the smallest that work."""

    first: Feature
    second: Feature

    @property
    def features(self) -> tuple[Feature, Feature]:
        return self.first, self.second

    @property
    def name(self) -> str:
        return f"{self.first.name} x {self.second.name}"

    def has(self, trait: str) -> bool:
        return any(trait in feature.traits for feature in self.features)

    @property
    def model_ranks(self) -> int:
        return math.prod(feature.degree for feature in self.features)

    @property
    def dp(self) -> int:
        needed = max(feature.dp for feature in self.features)
        return max(needed, 2) if self.model_ranks == 1 else needed

    @property
    def world(self) -> int:
        return self.dp * self.model_ranks

    @property
    def accumulation(self) -> int:
        return int(self.config().get("gradient_accumulation_steps", 1))

    @property
    def num_parts(self) -> int:
        return self.accumulation * self.dp

    @property
    def precision(self) -> str:
        return next((p for p in ("fp16", "bf16") for feature in self.features if p in feature.config), "fp32")

    @property
    def optimizer(self) -> dict[str, Any]:
        default = ADAMW if self.precision == "fp32" else SGD
        return next((f.config["optimizer"] for f in self.features if f.key == "optimizer"), default)

    @property
    def is_one_bit(self) -> bool:
        return self.optimizer["type"] in ONE_BIT

    @property
    def steps(self) -> int:
        """One of them is left out where there is an overflow."""
        return STEPS + self.has("overflow")

    def overflows(self, step: int) -> bool:
        return self.has("overflow") and step == 1

    @property
    def saved_after(self) -> int:
        """The step before which a run is saved and resumed, so that 0/1 Adam's ranks are together there."""
        return SAVED_AFTER + self.has("overflow")

    def config(self, index: str = "index") -> dict[str, Any]:
        base: dict[str, Any] = {
            "train_batch_size": GLOBAL_BATCH,
            "gradient_clipping": 0.0,
            "optimizer": self.optimizer,
            "seed": 0,
        }
        for feature in self.features:
            base = _merged(base, feature.config)
        return _filled(base, index)


def _merged(base: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping) and key != "optimizer"
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _filled(value: Any, index: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(inner, index) for key, inner in value.items()}
    return index if value == INDEX else value


def cells() -> list[Cell]:
    """Every pair of features that one run can have."""
    return [Cell(a, b) for a, b in itertools.combinations(FEATURES, 2) if a.key != b.key]


def cell_of(first: str, second: str) -> Cell:
    by_name = {feature.name: feature for feature in (*FEATURES, PLAIN)}
    return Cell(by_name[first], by_name[second])
