"""What one rank of a run did, step by step, as hashes: what `ptrain verify-resume` compares."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.data.loader import RepeatingLoader

_MAX_DEPTH = 3


def record(model_engine: Any, until: int, file: Path, said: list[str]) -> None:
    """Train to step ``until`` and write one JSON line a step to ``file``, and one first for the state at the start.

    ``said``: what the engine warned of until now; it goes into the first line.
    """
    batches = _Hashed(RepeatingLoader(model_engine.training_dataloader))
    with file.open("a") as lines:
        print(json.dumps({**_state(model_engine), "kind": "start", "said": said}), file=lines)
        while model_engine.global_steps < until:
            batches.taken.clear()
            loss = float(model_engine.train_batch(batches))
            line = {**_state(model_engine), "kind": "step", "loss": loss, "data": list(batches.taken)}
            print(json.dumps(line), file=lines, flush=True)


class _Hashed(Iterator[Any]):
    """Batches as they are, with a hash of each and of each of its samples."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.taken: list[dict[str, Any]] = []

    def __next__(self) -> Any:
        batch = next(self.batches)
        tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        num_samples = min((len(tensor) for tensor in tensors), default=0)
        samples = [digest(*(tensor[index] for tensor in tensors)) for index in range(num_samples)]
        self.taken.append({"batch": digest(*_leaves(batch)), "samples": samples})
        return batch


def _state(model_engine: Any) -> dict[str, Any]:
    parameters: dict[str, str] = {}
    moments: dict[str, str] = {}
    named = model_engine.optimizer.named_state()
    for shard in model_engine.roles.reduction.shards:
        parameters[shard.info.name] = digest(shard.parameter)
        moments |= {f"{shard.info.name}.{key}": digest(value) for key, value in named.get(shard.info.name, {}).items()}
    parameters |= {f"{name} (a buffer)": digest(buffer) for name, buffer in model_engine.module.named_buffers()}
    loader, schedule = model_engine.training_dataloader, model_engine.lr_scheduler
    objects = {"the model": model_engine.module, "the dataset": loader.dataset, "the schedule": schedule}
    return {
        "step": model_engine.global_steps,
        "parameters": parameters,
        "moments": moments,
        "lr": model_engine.get_lr(),
        "loss_scale": model_engine.loss_scale,
        "attributes": {what: attributes(owner) for what, owner in objects.items() if owner is not None},
    }


def attributes(owner: Any) -> dict[str, str]:
    """Hashes of what ``owner``, and for a module those below it, keep as plain attributes: numbers, containers of them,
    generators, tensors that are no buffers. What is not of these kinds is left out."""
    found: dict[str, str] = {}
    owners = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
    for prefix, held in owners:
        for name, value in getattr(held, "__dict__", {}).items():
            if name.startswith("_") or name == "training":
                continue
            plain = _plain(value)
            if plain is not None:
                found[f"{prefix}.{name}".lstrip(".")] = plain
    return found


def _plain(value: Any, depth: int = 0) -> str | None:
    """A hash of a value that can be state; None for what cannot be compared."""
    if isinstance(value, torch.Tensor):
        return None if value.is_meta else digest(value)
    if isinstance(value, torch.Generator):
        return digest(value.get_state())
    if isinstance(value, random.Random):
        return digest(value.getstate())
    if isinstance(value, np.random.Generator):
        return digest(str(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return digest(str(value.get_state()))
    if isinstance(value, np.ndarray):
        return digest(value.tobytes())
    if isinstance(value, bool | int | float | str | bytes | None.__class__):
        return digest(value)
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | Mapping) and len(value) < 10000:
        entries = [*value.items()] if isinstance(value, Mapping) else value
        hashed = [_plain(entry, depth + 1) for entry in entries]
        return None if None in hashed else digest(*hashed)
    return None


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return [leaf for key in batch for leaf in _leaves(batch[key])]
    if isinstance(batch, list | tuple):
        return [leaf for entry in batch for leaf in _leaves(entry)]
    return [batch]


def digest(*values: Any) -> str:
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(value if isinstance(value, bytes) else repr(value).encode())
    return found.hexdigest()
