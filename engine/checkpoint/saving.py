"""Write a checkpoint: every rank its own tensors, rank 0 the manifest, then one rename, then `latest`.

A kill at any moment leaves either the old state of the folder or the new one, and `latest` on a whole checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from engine.checkpoint import folder
from engine.checkpoint.boxes import inside, partition_fault, show
from engine.checkpoint.dtypes import CODE_OF_DTYPE, name_of
from engine.checkpoint.errors import CheckpointError, listing
from engine.checkpoint.exchange import Exchange, exchange_of
from engine.checkpoint.json_values import encode
from engine.checkpoint.manifest import CLIENT_STATE, Manifest, Piece, SavedState, SavedTensor, encode_manifest, versions
from engine.checkpoint.manifest_reader import check_files
from engine.checkpoint.retention import Retention, prune
from engine.checkpoint.tensor_file import FileRecord, write_tensor_file
from engine.contracts import Chunk, OnLayoutChange, SavedLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TagValidation = Literal["Ignore", "Warn", "Fail"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Proposal:
    """What a rank wants to save, without tensors. Fields end in JSON text so that ranks compare to the bit."""

    tag: str
    counters: str
    layout: str
    states: dict[str, tuple[str, str]]
    client_state: str
    config: str


@dataclass(frozen=True)
class _Written:
    """What a rank wrote: its file (None where it had nothing to write) and its pieces of the tensors."""

    record: FileRecord | None
    tensors: dict[str, SavedTensor]


def save(
    directory: str | os.PathLike[str],
    tag: str | int,
    *,
    group: ProcessGroup | Exchange | None = None,
    rank: int,
    world_size: int,
    **contents: Any,
) -> Path:
    """Write checkpoint ``<directory>/<tag>`` and return its path: `prepare` and `Prepared.complete` in one."""
    exchange = exchange_of(group, rank, world_size)
    return prepare(directory, tag, exchange=exchange, **contents).complete(exchange)


def prepare(
    directory: str | os.PathLike[str],
    tag: str | int,
    *,
    chunks: Sequence[Chunk],
    states: Mapping[str, Mapping[str, Any]],
    layout: SavedLayout,
    client_state: Mapping[str, Any],
    config: Mapping[str, Any],
    counters: Mapping[str, Any],
    aliases: Mapping[str, str],
    exchange: Exchange,
    save_latest: bool = True,
    tag_validation: TagValidation = "Warn",
    metric: float | None = None,
    retention: Retention | None = None,
) -> Prepared:
    """Agree on a save of ``<directory>/<tag>`` and open its folder; all ranks call it, then `Prepared.complete`.

    ``chunks`` are the boxes that this rank must write (a box held by several ranks comes from one of them); together
    the ranks' boxes cover each tensor exactly once. Names are ``section.name``. A 0-size chunk declares its tensor.
    ``states`` maps a `Stateful`'s name to ``{"on_layout_change": ..., "state": JSON-able}``; ranks may differ in it
    unless it reshards. ``client_state`` (rank 0's counts) may hold tensors. ``aliases``: other name -> stored name of
    tied parameters, without section. ``metric``: what `Retention.keep_best` compares, lower is better; rank 0's counts.
    An existing checkpoint of the same tag is replaced in one step. All but the tensors' values is read before this
    returns.

    Raises `CheckpointError`, the same on every rank, naming rank and cause; `latest` and what it names are then as
    they were.
    """
    rank = exchange.rank
    directory = Path(directory)
    doing = f"Saving checkpoint {tag!r} into {directory}"
    client_tensors: list[Chunk] = []

    def propose() -> _Proposal:
        if tag_validation not in get_args(TagValidation):
            raise CheckpointError(
                f"tag_validation is {tag_validation!r}; allowed: {', '.join(get_args(TagValidation))}"
            )
        if any(chunk.name.startswith(f"{CLIENT_STATE}.") for chunk in chunks):
            raise CheckpointError(
                f"tensor names that begin with '{CLIENT_STATE}.' are reserved for client_state's tensors"
            )
        return _propose(tag, states, layout, client_state, config if rank == 0 else {}, counters, client_tensors)

    proposals = exchange.collect(propose, doing)
    agreed, partial = exchange.on_first(lambda: _begin(directory, proposals or [], tag_validation), doing)
    own = [*chunks, *client_tensors] if rank == 0 else list(chunks)
    return Prepared(
        directory, agreed, partial, doing, own, proposals or [], layout, dict(aliases), save_latest, metric, retention
    )


@dataclass
class Prepared:
    """A save that all ranks have agreed on. ``chunks``: what this rank writes. ``proposals`` are rank 0's to know."""

    directory: Path
    tag: str
    partial: Path
    doing: str
    chunks: list[Chunk]
    proposals: list[_Proposal]
    layout: SavedLayout
    aliases: dict[str, str]
    save_latest: bool
    metric: float | None
    retention: Retention | None

    def detach(self, exchange: Exchange, host: dict[Any, torch.Tensor]) -> None:
        """Copy this rank's values into host memory: training may change them from here on. All ranks call it.

        ``host`` is that memory, kept from save to save: its pages cost more to get than to fill.
        """

        def copy() -> None:
            old, chunks = dict(host), []
            host.clear()
            for chunk in self.chunks:
                tensor, place = chunk.tensor.detach(), (chunk.name, chunk.offsets)
                there = old.get(place)
                if there is None or (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                    there = torch.empty(chunk.sizes, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
                host[place] = there.copy_(tensor)
                chunks.append(replace(chunk, tensor=there))
            self.chunks = chunks

        try:
            exchange.collect(copy, self.doing)
        except BaseException:
            self._abandon(exchange.rank)
            raise

    def complete(self, exchange: Exchange) -> Path:
        """Write, commit by one rename, move `latest`, delete what retention does not keep. All ranks call it.

        Returns the checkpoint's path. Raises as `prepare` does; nothing of the save is left then.
        """
        rank = exchange.rank
        try:
            written = exchange.collect(lambda: _write(self.partial, rank, self.chunks), self.doing)

            def finish() -> Path:
                manifest = _manifest(self, written or [])
                check_files(manifest)  # a rank that wrote to a disk of its own shows here
                folder.write_synced(self.partial / folder.MANIFEST, encode_manifest(manifest))
                folder.commit(self.partial, self.directory / self.tag)
                if self.save_latest:
                    folder.write_latest(self.directory, self.tag)
                return self.directory / self.tag

            path = exchange.on_first(finish, self.doing)
        except BaseException:
            self._abandon(rank)
            raise
        self.chunks = []
        folder.in_progress.discard(self.partial)
        if rank == 0 and self.retention is not None:
            self._prune(self.retention)
        return path

    def _abandon(self, rank: int) -> None:
        self.chunks = []
        folder.in_progress.discard(self.partial)
        if rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _prune(self, retention: Retention) -> None:
        """The save is done: what goes wrong here is told and leaves more than was asked for."""
        try:
            prune(self.directory, retention, keep=[self.tag])
        except (CheckpointError, OSError) as error:
            logger.warning("old checkpoints in %s were not deleted: %s", self.directory, error)


def _propose(
    tag: str | int,
    states: Mapping[str, Mapping[str, Any]],
    layout: SavedLayout,
    client_state: Mapping[str, Any],
    config: Mapping[str, Any],
    counters: Mapping[str, Any],
    client_tensors: list[Chunk],
) -> _Proposal:
    def keep_tensor(tensor: torch.Tensor) -> str:
        name = f"{CLIENT_STATE}.{len(client_tensors)}"
        client_tensors.append(Chunk.whole(name, tensor))
        return name

    encoded: dict[str, tuple[str, str]] = {}
    for name, entry in states.items():
        policy = entry["on_layout_change"]
        if policy not in get_args(OnLayoutChange):
            allowed = ", ".join(get_args(OnLayoutChange))
            raise CheckpointError(f"states.{name}.on_layout_change is {policy!r}; allowed: {allowed}")
        encoded[name] = policy, json.dumps(encode(entry["state"], f"states.{name}"))
    return _Proposal(
        tag=folder.check_tag(tag),
        counters=json.dumps(encode(dict(counters), "counters")),
        layout=json.dumps({**asdict(layout), "mesh": dict(layout.mesh)}, sort_keys=True),
        states=encoded,
        client_state=json.dumps(encode(dict(client_state), CLIENT_STATE, keep_tensor)),
        config=json.dumps(encode(dict(config), "config")),
    )


def _begin(directory: Path, proposals: Sequence[_Proposal], tag_validation: TagValidation) -> tuple[str, Path]:
    """Rank 0: check that the ranks mean the same save, clear what crashes left, open the partial folder."""
    first = proposals[0]
    for rank, other in enumerate(proposals):
        for what in ("counters", "layout"):
            if getattr(other, what) != getattr(first, what):
                raise CheckpointError(
                    f"rank {rank} has {what} {getattr(other, what)} where rank 0 has {getattr(first, what)}: the "
                    "ranks are not at the same point of the run"
                )
    tags = {rank: proposal.tag for rank, proposal in enumerate(proposals) if proposal.tag != first.tag}
    if tags:
        others = listing([f"{tag!r} on rank {rank}" for rank, tag in tags.items()])
        if tag_validation == "Fail":
            raise CheckpointError(f"the ranks pass different tags: {first.tag!r} on rank 0, {others}")
        if tag_validation == "Warn":
            logger.warning(
                "The ranks pass different checkpoint tags, rank 0's is used: %r on rank 0, %s", first.tag, others
            )
    if any(proposal.client_state != first.client_state for proposal in proposals):
        logger.warning("client_state differs between ranks; rank 0's is saved.")
    if not directory.exists():
        os.makedirs(directory)
        folder.sync(directory.parent)
    folder.clean(directory)
    partial = folder.work_path(directory, first.tag, "partial")
    os.mkdir(partial)
    folder.in_progress.add(partial)
    return first.tag, partial


def _write(partial: Path, rank: int, chunks: Sequence[Chunk]) -> _Written:
    """Write this rank's file."""
    name = f"rank_{rank:05d}.safetensors"
    to_write: dict[str, torch.Tensor] = {}
    parts: list[dict[str, SavedTensor]] = []
    for chunk in chunks:
        _check(chunk)
        box = chunk.offsets, chunk.sizes
        key = chunk.name if chunk.sizes == chunk.global_shape else chunk.name + show(box)
        if key in to_write:
            raise CheckpointError(f"{chunk.name}: elements {show(box)} are given twice by rank {rank}")
        pieces = (Piece(name, key, box),) if 0 not in chunk.sizes else ()
        if pieces:
            to_write[key] = chunk.tensor
        parts.append({chunk.name: SavedTensor(chunk.global_shape, CODE_OF_DTYPE[chunk.tensor.dtype], pieces)})
    record = write_tensor_file(partial / name, list(to_write.items())) if to_write else None
    return _Written(record, _merge(parts))


def _check(chunk: Chunk) -> None:
    if not inside((chunk.offsets, chunk.sizes), chunk.global_shape) or tuple(chunk.tensor.shape) != chunk.sizes:
        raise CheckpointError(
            f"{chunk.name}: a tensor of shape {tuple(chunk.tensor.shape)} for the box at {chunk.offsets} of sizes "
            f"{chunk.sizes} of a tensor of shape {chunk.global_shape}"
        )
    tensor = chunk.tensor
    if tensor.dtype not in CODE_OF_DTYPE or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{chunk.name}: a {tensor.dtype} tensor of layout {tensor.layout} on {tensor.device} cannot be saved; "
            f"dense tensors that hold data, of the dtypes {', '.join(map(name_of, CODE_OF_DTYPE))}, can"
        )


def _merge(parts: Sequence[Mapping[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """One entry a tensor with the pieces of all ``parts``."""
    merged: dict[str, SavedTensor] = {}
    pieces: dict[str, list[Piece]] = {}
    for part in parts:
        for name, tensor in part.items():
            known = merged.setdefault(name, tensor)
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} in one chunk and {known.dtype} {list(known.shape)} "
                    "in another"
                )
            pieces.setdefault(name, []).extend(tensor.pieces)
    return {name: replace(tensor, pieces=tuple(pieces[name])) for name, tensor in merged.items()}


def _manifest(save: Prepared, written: Sequence[_Written]) -> Manifest:
    """Rank 0: put together what all ranks said, and refuse what would not load."""
    tensors = _merge([part.tensors for part in written])
    for name, tensor in tensors.items():
        fault = partition_fault(tensor.shape, [piece.box for piece in tensor.pieces])
        if fault is not None:
            raise CheckpointError(f"{name}: {fault}")
    first = save.proposals[0]
    return Manifest(
        tag=save.tag,
        tensors=tensors,
        files={part.record.name: part.record for part in written if part.record is not None},
        aliases=save.aliases,
        states=_merge_states([proposal.states for proposal in save.proposals]),
        encoded_client_state=json.loads(first.client_state),
        config=json.loads(first.config),
        counters=json.loads(first.counters),
        layout=save.layout,
        metric=save.metric,
        versions=versions(),
        path=save.partial,
    )


def _merge_states(by_rank: Sequence[Mapping[str, tuple[str, str]]]) -> dict[str, SavedState]:
    """One value where the ranks agree, else one a rank: only a state that stays with its rank may differ."""
    merged: dict[str, SavedState] = {}
    for name in dict.fromkeys(name for states in by_rank for name in states):
        absent = [rank for rank, states in enumerate(by_rank) if name not in states]
        if absent:
            raise CheckpointError(f"states.{name} is missing on rank {absent[0]}: every rank saves the same states")
        policies = {states[name][0] for states in by_rank}
        values = [states[name][1] for states in by_rank]
        if len(policies) > 1:
            raise CheckpointError(
                f"states.{name}.on_layout_change differs between ranks: {', '.join(sorted(policies))}"
            )
        policy = by_rank[0][name][0]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing and policy == "reshard":
            raise CheckpointError(
                f"states.{name} differs between rank 0 and rank {differing[0]}, so it cannot be carried to another "
                "layout: make it the same on all ranks, or let it say 'drop' or 'same_layout_only'"
            )
        kept = values if differing else values[:1]
        merged[name] = SavedState(policy, tuple(json.loads(value) for value in kept))  # type: ignore[arg-type]  # checked
    return merged
