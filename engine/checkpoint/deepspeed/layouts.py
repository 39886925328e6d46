"""The trained parameters and their optimizer state in a DeepSpeed checkpoint, whichever stage wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.checkpoint.deepspeed.files import SavedFiles
from engine.checkpoint.deepspeed.partitions import Part, Shapes, assign_to_groups, chunks_of, flat_parts, sharded_parts
from engine.checkpoint.errors import CheckpointError, listing
from engine.contracts import Chunk


@dataclass(frozen=True)
class Trained:
    """``parts``: where the elements of each trained parameter lie in ``values[rank][vector]``; its optimizer state lies
    alike in ``state[rank][vector][key]``. ``groups``: the options of the parameter groups."""

    stage: int
    parts: Sequence[Part]
    values: Sequence[Sequence[Any]]
    state: Sequence[Sequence[Mapping[str, Any]]]
    groups: Sequence[Mapping[str, Any]]
    loss_scaler: Any
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {part.name for part in self.parts}

    def moment_keys(self) -> list[str]:
        """The keys whose values lie as the parameters do; what is neither that nor a scalar is noted."""
        keys: dict[str, None] = {}
        strange: set[str] = set()
        for values, states in zip(self.values, self.state, strict=True):
            for vector, state in zip(values, states, strict=True):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim and value.numel() >= vector.numel():
                        keys[key] = None
                    elif not _is_scalar(value) and value is not None:
                        strange.add(key)
        if strange:
            self.notes.append(f"Left out: the optimizer's {listing(sorted(strange))}, of a shape that is not known.")
        return [key for key in keys if key not in strange]

    def moments(self, key: str) -> Iterator[Chunk]:
        having = [part for part in self.parts if key in self.state[part.rank][part.vector]]
        vectors = [[state.get(key) for state in states] for states in self.state]
        yield from chunks_of(having, vectors, "optimizer", key)

    def scalars(self) -> Iterator[Chunk]:
        """Step counts and the like: kept once for a flat vector, wanted once for a parameter."""
        done: set[str] = set()
        for part in self.parts:
            if part.name in done:
                continue
            done.add(part.name)
            for key, value in self.state[part.rank][part.vector].items():
                if _is_scalar(value):
                    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                    yield Chunk(f"optimizer.{part.name}.{key}", (), (), (), tensor.detach().reshape(()))


def trained_parameters(
    files: SavedFiles, shapes: Shapes, module: Mapping[str, Any], weights_only: bool = False
) -> Trained:
    """``shapes``: of every parameter of the model, in its order, under its first name. Raises `CheckpointError`."""
    if not files.optimizers:
        return _whole_on_every_rank(files, shapes, module, weights_only)
    saved = [_get(file, "optimizer_state_dict", files) for file in files.optimizers]
    stage = int(saved[0].get("zero_stage", 0))
    num_ranks = len(saved)
    counts = saved[0].get("partition_count", num_ranks)
    if {*(counts if isinstance(counts, list) else [counts])} != {num_ranks}:
        raise CheckpointError(
            f"{files.path} holds the files of {num_ranks} ranks, but parameters were cut into {counts} parts: files "
            "are missing, or it was written with MiCS or expert parallelism, which is not read."
        )
    groups: list[Shapes] = [dict(group) for group in _get(files.models[0], "param_shapes", files)]
    state: list[list[Mapping[str, Any]]]
    if stage == 3:
        values = [list(_get(rank, "fp32_flat_groups", files)) for rank in saved]
        parts = list(sharded_parts(groups, [vector.numel() for vector in values[0]], num_ranks))
        inner = [_get(rank, "optimizer_state_dict", files) for rank in saved]
        state = [_by_vector(rank, len(values[0])) for rank in inner]
        options = inner[0].get("param_groups", [])
    else:
        values = [list(_get(rank, "single_partition_of_fp32_groups", files)) for rank in saved]
        sizes = [vector.numel() for vector in values[0]]
        parts = list(flat_parts(groups, sizes, num_ranks, saved[0].get("param_alignment_paddings")))
        base = [_get(rank, "base_optimizer_state", files) for rank in saved]
        if isinstance(base[0], list):  # an elastic checkpoint
            steps = {"step": saved[0]["base_optimizer_state_step"]} if "base_optimizer_state_step" in saved[0] else {}
            state = [[{**steps, **group} for group in rank] for rank in base]
            options = []
        else:
            state = [_by_vector(rank, len(sizes)) for rank in base]
            options = base[0].get("param_groups", [])
    absent = {name for group in groups for name in group} - {part.name for part in parts}
    if absent:
        raise CheckpointError(f"{files.path}: no elements of {listing(sorted(absent))} are in the ranks' files.")
    return Trained(stage, parts, values, state, options, saved[0].get("loss_scaler"))


def _whole_on_every_rank(files: SavedFiles, shapes: Shapes, module: Mapping[str, Any], weights_only: bool) -> Trained:
    """Stage 0: torch's own optimizer state, by number; masters beside it where the model is in 16 bit."""
    saved = files.models[0].get("optimizer")
    if saved is None:
        if not weights_only and files.models[0].get("param_shapes"):
            raise CheckpointError(f"{files.path} lacks the *_optim_states.pt files, which hold the fp32 parameters.")
        return Trained(0, [], [[]], [[]], [], None)
    inner = saved.get("optimizer_state_dict", saved)
    options = inner.get("param_groups", [])
    masters = saved.get("fp32_groups") or saved.get("fp32_groups_flat")
    numbers = [list(group["params"]) for group in options]
    if "fp32_groups_flat" in saved:
        if len(numbers) > 1 or sum(torch.Size(shape).numel() for shape in shapes.values()) != masters[0].numel():
            raise _ambiguous(files)
        members = [list(shapes)]
        sizes = [masters[0].numel()]
        parts = list(flat_parts([{name: shapes[name] for name in members[0]}], sizes, 1, None))
        return Trained(0, parts, [list(masters)], [_by_vector(inner, 1)], options, saved)
    if masters is not None:
        group_shapes = [[tuple(master.shape) for master in group] for group in masters]
    else:
        states = inner.get("state", {})
        if any(_shape(states.get(number, {})) is None for group in numbers for number in group):
            if len(numbers) != 1 or len(numbers[0]) != len(shapes):
                raise _ambiguous(files)
            group_shapes = [[tuple(shape) for shape in shapes.values()]]
        else:
            group_shapes = [[_shape(states[number]) or () for number in group] for group in numbers]
    assigned = assign_to_groups(shapes, group_shapes)
    if assigned is None:
        raise _ambiguous(files)
    names = [name for group in assigned for name in group]
    values = [master for group in masters for master in group] if masters is not None else [module[n] for n in names]
    parts = [
        Part(name, tuple(shapes[name]), 0, torch.Size(shapes[name]).numel(), 0, index, 0)
        for index, name in enumerate(names)
    ]
    return Trained(0, parts, [values], [_by_vector(inner, len(names))], options, saved)


def _ambiguous(files: SavedFiles) -> CheckpointError:
    return CheckpointError(
        f"{files.path} (stage 0) does not say which parameter is which in the optimizer's groups, and their shapes "
        "leave more than one way. Import the weights alone (--weights-only), or let DeepSpeed save it at stage 1."
    )


def _by_vector(optimizer: Mapping[str, Any], num_vectors: int) -> list[Mapping[str, Any]]:
    """torch's optimizer state in the order of its parameters, which are the flat vectors. Empty before a step."""
    groups, states = optimizer.get("param_groups", []), optimizer.get("state", {})
    numbered = [(number, group) for group in groups for number in group["params"]]
    found: list[Mapping[str, Any]] = []
    for number, group in numbered[:num_vectors]:
        state = dict(states.get(number, {}))
        if state and "step" not in state and "step" in group:
            state["step"] = group["step"]
        found.append(state)
    return found + [{}] * (num_vectors - len(found))


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter, from its moments."""
    return next((tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.ndim), None)


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, torch.Tensor) and value.ndim == 0
    )


def _get(mapping: Mapping[str, Any], key: str, files: SavedFiles) -> Any:
    if mapping.get(key) is None:
        raise CheckpointError(f"{files.path}: {key!r} is missing in a file of it; only ZeRO checkpoints are read.")
    return mapping[key]
