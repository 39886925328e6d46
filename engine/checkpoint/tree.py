"""One tree: everything a run needs to go on, gathered for `save` and handed back by `load`.

Tensors travel as boxes of global tensors: ``parameters.NAME`` (masters, fp32 where the model is 16-bit),
``buffers.NAME``, ``extra_state.KEY`` and ``optimizer.NAME.KEY``. Everything else is JSON, from `Stateful` parts. Names
do not depend on the layout, so any checkpoint loads under any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from engine.checkpoint.background import BackgroundWriter
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.exchange import Alone, TorchExchange
from engine.checkpoint.extra_state import ExtraState
from engine.checkpoint.loading import load_client_state, load_tensors
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.manifest_reader import read_manifest
from engine.checkpoint.report import describe
from engine.checkpoint.retention import Retention
from engine.checkpoint.roll_call import RollCall
from engine.checkpoint.saving import prepare
from engine.collectives.ledger import Ledger
from engine.config.sections.checkpoint import CheckpointSection
from engine.contracts import Chunk, EngineError, SavedLayout, Stateful
from engine.mesh import Mesh
from engine.parameters import ParameterRegistry, persistent_buffers
from engine.torch_compat import default_store

log = logging.getLogger("engine")
T = TypeVar("T")


class Shard(Protocol):
    """This rank's part of a parameter, as the ZeRO stages give it."""

    @property
    def info(self) -> Any: ...
    @property
    def parameter(self) -> nn.Parameter: ...
    @property
    def start(self) -> int: ...
    @property
    def on_every_rank(self) -> bool: ...
    def chunks(self, name: str, tensor: Tensor) -> Iterator[Chunk]: ...


class OptimizerState(Protocol):
    @property
    def kinds(self) -> list[str]: ...
    def initialize_state(self, names: Collection[str] | None = None) -> None: ...
    def named_state(self) -> dict[str, dict[str, Any]]: ...
    def forget_state(self, names: Collection[str]) -> None: ...
    def load_named_state(self, named: Mapping[str, Mapping[str, Any]]) -> list[str]: ...
    def group_options(self) -> list[dict[str, Any]]: ...
    def load_group_options(self, saved: Sequence[Mapping[str, Any]]) -> None: ...
    def settle(self) -> None: ...
    def rank_tensors(self, create: bool = False) -> dict[str, Tensor]: ...
    def state_was_loaded(self) -> None: ...


class StateTree:
    """The state of one engine on one rank.

    ``trained``/``frozen``: this rank's shards. ``writes_shards``: whether this rank is the one of its replicas that
    saves them; what is on every data-parallel rank comes from the first of them, as what tp ranks or pipeline stages
    hold alike does. Buffers are ``model``'s at the time, for a module may replace its own. ``config``
    is the resolved config as JSON. The optimizer's tensors that belong to a rank are saved as rows of ``rank.NAME``;
    they are loaded where the ranks are the same, else they begin at zero. All ranks construct it.
    """

    def __init__(
        self,
        *,
        trained: Sequence[Shard],
        frozen: Sequence[Shard],
        model: nn.Module,
        optimizer: OptimizerState | None,
        registry: ParameterRegistry,
        writes_shards: bool,
        mesh: Mesh,
        layout: SavedLayout,
        config: Mapping[str, Any],
        settings: CheckpointSection,
        ledger: Ledger,
    ) -> None:
        self._trained, self._frozen, self._model, self._optimizer = trained, frozen, model, optimizer
        self._extra_state = ExtraState(model)
        self._own_trained, self._own_frozen = (
            [s for s in these if not s.info.is_copy and registry.is_written(s.info)] for these in (trained, frozen)
        )
        self._aliases, self._rank, self.layout, self._registry = registry.aliases, mesh.rank, layout, registry
        self._writes_shards, self._tp_rank = writes_shards, mesh.coordinates["tp"]
        self._place_in_stage = mesh.place_in_stage
        self._empty = [info for info in registry.infos if not info.numel]
        self._is_first_data_rank = not any(p for axis, p in mesh.coordinates.items() if axis not in ("pp", "tp"))
        self._config, self._settings = config, settings
        self._retention = Retention(settings.keep_last, settings.keep_every, settings.keep_best)
        counted = ledger.account("checkpoint")
        self._exchange = TorchExchange(None, counted) if mesh.world_size > 1 else Alone()
        self._roll_call = RollCall(default_store(), mesh.rank, mesh.world_size, settings.rank_timeout_seconds)
        self._background: BackgroundWriter | None = None
        if getattr(settings, "async"):
            group = mesh.background_group()
            self._background = BackgroundWriter(self._exchange if group is None else TorchExchange(group, counted))
        self._parts: dict[str, Stateful] = {}
        self.restored: set[str] = set()
        """The parts that the last load gave their state back."""

    def add(self, *parts: Stateful | None) -> None:
        """Parts without a state of their own (None) are left out."""
        self._parts |= {part.name: part for part in parts if part is not None}

    # --- saving ------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: str,
        client_state: Mapping[str, Any],
        save_latest: bool = True,
        exclude_frozen: bool = False,
        metric: float | None = None,
    ) -> Path:
        """Write ``directory/tag``, or begin to where ``checkpoint.async`` is on. All ranks call it.

        Raises EngineError where some do not, and `CheckpointError`, on all ranks alike, where one cannot write.
        """
        self._roll_call.call("save_checkpoint", "load_checkpoint")
        self.wait()
        chunks: list[Chunk] = []
        if self._optimizer is not None:
            self._optimizer.settle()
            chunks += self._rank_chunks(self._optimizer.rank_tensors())
        if self._writes_shards:
            chunks += [*self._parameter_chunks(self._own_trained), *self._optimizer_chunks()]
        if not exclude_frozen:
            first, writes = self._is_first_data_rank, self._writes_shards
            chunks += self._parameter_chunks(s for s in self._own_frozen if (first if s.on_every_rank else writes))
        if self._is_first_data_rank and self._tp_rank == 0:
            stages, here = self._registry.buffer_stages, self._registry.stage
            chunks += [c for c in self._buffer_chunks() if stages.get(c.name.removeprefix("buffers."), 0) == here]
            chunks += self._extra_state.chunks(key for key in self._extra_state if stages.get(key, 0) == here)
        if self._rank == 0:
            chunks += self._empty_chunks(frozen=not exclude_frozen)
        states: dict[str, dict[str, Any]] = {
            part.name: {"on_layout_change": part.on_layout_change, "state": part.state()}
            for part in self._parts.values()
        }
        if self._optimizer is not None:
            states["optimizer_groups"] = {
                "on_layout_change": "reshard",
                "state": {"kinds": self._optimizer.kinds, "groups": self._optimizer.group_options()},
            }
        save = prepare(
            directory,
            tag,
            chunks=chunks,
            states=states,
            layout=self.layout,
            client_state=client_state,
            config=self._config,
            counters=self._parts["run"].state() if "run" in self._parts else {},
            aliases=self._aliases,
            exchange=self._exchange,
            save_latest=save_latest,
            tag_validation=self._settings.tag_validation,
            metric=metric,
            retention=self._retention,
        )
        if self._background is None:
            return save.complete(self._exchange)
        save.detach(self._exchange, self._background.host)
        self._background.submit(save)
        return save.directory / save.tag

    def wait(self) -> CheckpointError | None:
        """Wait for the save in the background, if there is one. Returns what it failed with, the same on all ranks."""
        return self._background.wait() if self._background is not None else None

    def _parameter_chunks(self, shards: Iterable[Shard]) -> Iterator[Chunk]:
        for shard in shards:
            yield from shard.chunks(f"parameters.{shard.info.name}", shard.parameter.detach())

    def _buffer_chunks(self) -> list[Chunk]:
        return [Chunk.whole(f"buffers.{name}", buffer) for name, buffer in persistent_buffers(self._model).items()]

    def _rank_chunks(self, tensors: Mapping[str, Tensor]) -> list[Chunk]:
        """A row for each rank of a pipeline stage; stages have parameters, and so names, of their own."""
        row, num_rows = self._place_in_stage
        stage = "" if num_rows == self.layout.world_size else f"pp{self._registry.stage}."
        whole = {f"rank.{stage}{name}": tensor.view(1, -1) for name, tensor in tensors.items()}
        return [Chunk(name, (num_rows, t.numel()), (row, 0), (1, t.numel()), t) for name, t in whole.items()]

    def _empty_chunks(self, frozen: bool = True) -> list[Chunk]:
        wanted = [info for info in self._empty if info.trainable or frozen]
        return [Chunk.whole(f"parameters.{info.name}", torch.empty(info.shape, dtype=info.dtype)) for info in wanted]

    def _optimizer_chunks(self) -> Iterator[Chunk]:
        """State shaped like the shard is cut like it; anything else (step counts) comes from the first shard's rank."""
        named = self._optimizer.named_state() if self._optimizer is not None else {}
        for shard in self._own_trained:
            for key, value in named.get(shard.info.name, {}).items():
                name = f"optimizer.{shard.info.name}.{key}"
                if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
                    yield from shard.chunks(name, value)
                elif value is not None and shard.start == 0 and shard.info.stands_for_all:
                    yield Chunk.whole(name, _as_tensor(value))

    # --- loading -----------------------------------------------------------------------------------------------

    def load(
        self,
        directory: str | os.PathLike[str],
        tag: str | None,
        *,
        strict: bool,
        optimizer: bool,
        lr_scheduler: bool,
        run: bool,
        override_batch: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Fill this rank's shards and parts. ``run``: counters, data position, loss scale and the like.

        Returns (path, client_state), or (None, None) with a warning where there is nothing. Raises EngineError, alike
        on all ranks, for a checkpoint that does not fit.
        """
        self._roll_call.call("load_checkpoint", "save_checkpoint")
        self.wait()
        common: dict[str, Any] = {"rank": self._rank, "world_size": self.layout.world_size, "group": self._exchange}
        manifest = read_manifest(directory, tag, verify=self._settings.verify, **common)
        if manifest is None:
            log.warning("no checkpoint in %s: nothing was loaded", os.fspath(directory))
            return None, None
        if run:
            self._check_batch(manifest, override_batch)
        wanted = [part for part in self._parts.values() if (lr_scheduler if part.name == "lr_scheduler" else run)]
        states = self._everywhere(manifest, lambda: self._decode(manifest, [part.name for part in wanted]))
        groups = None
        if optimizer and self._optimizer is not None:
            groups = self._everywhere(manifest, lambda: self._decode(manifest, ["optimizer_groups"]))[
                "optimizer_groups"
            ]
            self._check_optimizer(manifest, groups)
        chunks = [*self._parameter_chunks((*self._trained, *self._frozen)), *self._buffer_chunks()]
        chunks += self._empty_chunks()
        extra = self._extra_state.wanted(manifest)
        chunks += extra
        whole: dict[str, dict[str, Tensor]] = {}
        if optimizer and self._optimizer is not None:
            chunks += self._wanted_optimizer_chunks(manifest, whole)
            chunks += self._wanted_rank_chunks(manifest)
        loaded = load_tensors(
            directory,
            manifest.tag,
            chunks,
            strict=["parameters"] if strict else False,
            verify=self._settings.verify,
            **common,
        )
        self.restored = {name for name, state in states.items() if state is not None}

        def restore() -> dict[str, Any]:
            with _refusing(manifest, "extra_state"):
                self._extra_state.load(manifest, extra)
            if optimizer and self._optimizer is not None:
                self._optimizer.load_named_state(_complete(self._optimizer.named_state(), whole))
                if groups is not None:
                    with _refusing(manifest, "optimizer_groups"):
                        self._optimizer.load_group_options(groups["groups"])
                    self.restored.add("optimizer_groups")
                self._optimizer.state_was_loaded()
            for part in wanted:
                if part.name in self.restored:
                    with _refusing(manifest, part.name):
                        part.load(states[part.name], manifest.layout)
            return load_client_state(manifest)

        client_state = self._everywhere(manifest, restore)
        if self._rank == 0:
            asked = [part.name for part in wanted]
            asked += ["optimizer_groups"] if optimizer and self._optimizer is not None else []
            for line in describe(
                manifest, layout=self.layout, loaded=loaded, restored_states=self.restored, asked_states=asked
            ):
                log.warning("%s", line)
        return str(manifest.path), client_state

    def _everywhere(self, manifest: Manifest, action: Callable[[], T]) -> T:
        """``action()`` on every rank; what one of them raises, all do."""
        results: list[T] = []
        self._exchange.collect(lambda: results.append(action()), f"Loading {manifest.path}")
        return results[0]

    def _decode(self, manifest: Manifest, names: Sequence[str]) -> dict[str, Any]:
        return {name: manifest.state(name, self.layout, self._rank) for name in names}

    def _wanted_optimizer_chunks(self, manifest: Manifest, whole: dict[str, dict[str, Tensor]]) -> list[Chunk]:
        """Targets for the saved optimizer state of this rank's shards; what is not cut like them goes to ``whole``."""
        assert self._optimizer is not None
        saved = {name for name in manifest.tensors if name.startswith("optimizer.")}
        names = [s.info.name for s in self._trained if any(n.startswith(f"optimizer.{s.info.name}.") for n in saved)]
        self._optimizer.forget_state({shard.info.name for shard in self._trained} - set(names))
        self._optimizer.initialize_state(names)
        named = self._optimizer.named_state()
        chunks: list[Chunk] = []
        for shard in self._trained:
            for key, value in named.get(shard.info.name, {}).items():
                name = f"optimizer.{shard.info.name}.{key}"
                if manifest.resolve(name) is None:
                    continue
                if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
                    chunks += shard.chunks(name, value)
                elif value is not None:
                    target = torch.empty_like(_as_tensor(value), device="cpu")
                    whole.setdefault(shard.info.name, {})[key] = target
                    chunks.append(Chunk.whole(name, target))
        return chunks

    def _wanted_rank_chunks(self, manifest: Manifest) -> list[Chunk]:
        """Targets for what this rank saved for itself, where the ranks are the same; else what it has is zeroed."""
        assert self._optimizer is not None
        saved = [name for name in manifest.tensors if name.startswith("rank.")]
        chunks = self._rank_chunks(self._optimizer.rank_tensors(create=bool(saved)))
        fits = {
            chunk.name
            for chunk in chunks
            if manifest.same_ranks(self.layout)
            and chunk.name in manifest.tensors
            and manifest.tensors[chunk.name].shape == chunk.global_shape
        }
        for chunk in chunks:
            if chunk.name not in fits:
                chunk.tensor.zero_()
        if self._rank == 0 and len(fits) < len(saved):
            log.warning(
                "%s was written by other ranks or under another bucket layout: the compression errors that each rank "
                "had kept for itself begin at zero again",
                manifest.path,
            )
        return [chunk for chunk in chunks if chunk.name in fits]

    def _check_batch(self, manifest: Manifest, override: bool) -> None:
        saved, now = manifest.layout.global_batch_size, self.layout.global_batch_size
        if saved == now or override:
            return
        raise EngineError(
            f"{manifest.path} was trained with a global batch of {saved} samples, this run has {now}: the "
            "schedule and the data position would mean something else. Set train_batch_size to "
            f"{saved} (accumulation follows), or ask for the change with override_batch=True (--override-batch)"
        )

    def _check_optimizer(self, manifest: Manifest, saved: Mapping[str, Any] | None) -> None:
        assert self._optimizer is not None
        kinds = self._optimizer.kinds if saved is None else saved.get("kinds", []) if isinstance(saved, dict) else []
        if kinds not in (None, self._optimizer.kinds):  # an imported checkpoint may not say
            known = (
                kinds if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds) else ["nothing known"]
            )
            raise EngineError(
                f"{manifest.path} holds the state of {' and '.join(known)}, but this run steps with "
                f"{' and '.join(self._optimizer.kinds)}: use the same optimizer, or load with "
                "load_optimizer_states=False to begin its state anew"
            )


@contextlib.contextmanager
def _refusing(manifest: Manifest, name: str) -> Iterator[None]:
    """What a part makes of a state that it did not write."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{manifest.path}: the state of {name!r} cannot be taken over ({type(error).__name__}: {error}); it is "
            "damaged, or another version wrote it"
        ) from None


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _complete(
    named: Mapping[str, Mapping[str, Any]], whole: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """The states that have read parts of their own: those parts with the rest of their state, which is in place."""
    return {name: {**named[name], **parts} for name, parts in whole.items()}
