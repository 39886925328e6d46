"""What an unknown key was probably meant to be."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from engine.config.aliases import ALIASES
from engine.config.dialect import MEANINGLESS
from engine.config.fields import section_of
from engine.config.places import Path, join_path

MEANT: dict[str, str] = {
    "optimizer.name": "optimizer.type",
    "scheduler.name": "scheduler.type",
    "optimizer.lr": "optimizer.params.lr",
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "gradient_clip_val": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "grad_accum_type": "data_types.grad_accum_dtype",
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "num_warmup_steps": "scheduler.params.warmup_num_steps",
    "total_steps": "scheduler.params.total_num_steps",
    "zero": "zero_optimization",
    "zero_stage": "zero_optimization.stage",
    "lr_scheduler": "scheduler",
    "half": "fp16",
    "max_steps": "training.steps",
    "epochs": "training.num_epochs",
    "num_train_epochs": "training.num_epochs",
    "logging_steps": "steps_per_print",
    "partition_method": "pipeline.partition",
    "loss_scale": "fp16.loss_scale",
    "autocast": "torch_autocast",
    "csv": "csv_monitor",
    "tp_size": "tensor_parallel.size",
}
"""What people call a thing elsewhere (a key, or a whole path) -> the path it has here."""

ADVICE: dict[str, str] = {
    "fp16_scale_tolerance": "delete it: it is a setting of fairseq",
    "inference_batch_size": "delete it: only scripts of DeepSpeed-Chat read it, and not from here",
    "flash_attention": "delete it: which attention is used is the model's affair",
    "use_flash_attention": "delete it: which attention is used is the model's affair",
    "pipeline.enabled": 'delete it: "stages" above 1 switches the pipeline on',
    "pipeline.type": 'use "schedule", which names the order of forwards and backwards',
    "warmupcosinelr.warmup_min_lr": "use warmup_min_ratio, the share of the optimizer's lr to begin at",
    "warmupcosinelr.warmup_max_lr": "delete it: this schedule rises to optimizer.params.lr",
    "optimizer.enabled": "delete it: the section alone switches the optimizer on",
    "scheduler.enabled": "delete it: the section alone switches the schedule on",
    "zero_optimization.enabled": 'delete it: "stage" 0 switches ZeRO off',
}
"""What to do about keys that people write and that name nothing here (a key, a whole path, or
the argument of a type)."""

COMMON_WORDS = frozenset(["type", "enabled", "mode", "params", "device", "verbose", "dtype", "profile", "block"])
"""Keys of many meanings: where else one exists says nothing about what was meant."""

MAX_LENGTH = 64
"""Longer words are no misspelled keys."""


@functools.cache
def known_paths() -> dict[str, tuple[str, ...]]:
    """Every known key -> the sections where it exists ('' is the top level)."""
    from engine.config.config import Config

    found: dict[str, list[str]] = {}

    def visit(model: type[BaseModel], path: Path) -> None:
        for key, info in model.model_fields.items():
            found.setdefault(key, []).append(join_path(path))
            inner = section_of(info.annotation)
            if inner is not None:
                visit(inner, (*path, key))

    visit(Config, ())
    for old in ALIASES:
        found.setdefault(str(old[-1]), []).append(join_path(old[:-1]))
    return {key: tuple(dict.fromkeys(places)) for key, places in found.items()}


def distance(one: str, other: str) -> int:
    """The number of single-letter changes (insert, delete, replace, swap neighbours) between two words."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row = row, [i] + [0] * len(other)
        for j, b in enumerate(other, 1):
            row[j] = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                row[j] = min(row[j], before[j - 2] + 1)
        before = last
    return row[-1]


def nearest(word: str, candidates: Iterable[str], strictly: bool = False) -> str | None:
    """The candidate that a misspelled word most likely means, or None when nothing is near.

    Near is one wrong letter in a short word, two or three in a long one; unless ``strictly``, also a word that has most
    of its letters in the same order.
    """
    if len(word) > MAX_LENGTH:
        return None
    pool = list(dict.fromkeys(candidates))
    folded = word.lower().replace("-", "_").replace(" ", "_").strip("_")
    limit = 1 if len(word) < 5 else 2 if len(word) < 10 else 3
    close = [
        (distance(folded, candidate.lower()), candidate)
        for candidate in pool
        if abs(len(candidate) - len(folded)) <= limit and len(set(folded) ^ set(candidate.lower())) <= 2 * limit
    ]
    best = min(close, default=None)
    if best is not None and best[0] <= limit:
        return best[1]
    matches = [] if strictly else difflib.get_close_matches(folded, pool, n=1, cutoff=0.84)
    return matches[0] if matches else None


@dataclass(frozen=True)
class Suggestion:
    """``repair``: a clause, '' when nothing suggests itself. ``targets``: the paths that it names."""

    repair: str = ""
    targets: tuple[str, ...] = ()


def repair_for(path: Path, siblings: Iterable[str], value: Any = None) -> Suggestion:
    """What an unknown key was probably meant to be.

    ``siblings`` are the keys that exist beside it. The nearest sibling comes first when it is one letter away, then
    what the key is known to mean, then the same key in another section, then near words in this section and elsewhere.
    """
    key, section = str(path[-1]), path[:-1]
    siblings = list(siblings) + [str(old[-1]) for old in (*ALIASES, *MEANINGLESS) if old[:-1] == section]
    near = nearest(key, siblings) or extended(key, siblings)
    here = _did_you_mean(join_path((*section, near))) if near else Suggestion()
    if near and distance(key.lower(), near.lower()) <= (1 if len(key) < 8 else 2):
        return here
    written = join_path(path).lower()
    if written in ADVICE or key.lower() in ADVICE:
        return Suggestion(ADVICE.get(written) or ADVICE[key.lower()])
    meant = MEANT.get(written) or MEANT.get(key.lower())
    if meant and meant != join_path(path):
        return _did_you_mean(meant)
    places = [place for place in known_paths().get(key, ()) if place != join_path(section)]
    if 0 < len(places) <= 3 and key not in COMMON_WORDS:
        named = " and ".join(f"in {place}" if place else "at the top level" for place in places)
        targets = tuple(f"{place}.{key}" if place else key for place in places)
        return Suggestion(f"this key exists {named}: move it there", targets)
    if here.repair:
        return here
    if isinstance(value, dict) and value:
        inner = [set(known_paths().get(str(name), ())) for name in value]
        homes = sorted(set.intersection(*inner) - {join_path(path)})
        if homes:
            targets = tuple(f"{homes[0]}.{name}" if homes[0] else str(name) for name in value)
            text = f"its keys belong in {homes[0]}" if homes[0] else f"put {', '.join(value)} at the top level"
            return Suggestion(text, targets)
    elsewhere = nearest(key, known_paths(), strictly=True)
    if places or elsewhere is None or len(elsewhere) < 7:
        return Suggestion()
    options = known_paths()[elsewhere][:2]
    return _did_you_mean(*(f"{place}.{elsewhere}" if place else elsewhere for place in options))


def _did_you_mean(*paths: str) -> Suggestion:
    return Suggestion(f"did you mean {' or '.join(paths)}?", paths)


def extended(word: str, candidates: Iterable[str]) -> str | None:
    """The longest candidate that a word begins or ends with: ``tag_validation`` for ``tag_validation_mode``."""
    return max((name for name in candidates if len(name) > 7 and _is_part(name, word)), key=len, default=None)


def _is_part(name: str, word: str) -> bool:
    return word.startswith(name + "_") or word.endswith("_" + name)
