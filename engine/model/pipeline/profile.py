"""How long each layer takes: forward and backward of one batch, layer by layer, on the model before it is cut."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError, LossSum
from engine.data.batch import loss_with_batch, place
from engine.device import same_generators, synchronize
from engine.mesh import Mesh
from engine.model.pipeline.layers import Layers
from engine.model.zero import autocast
from engine.plan import Plan
from engine.torch_compat import tree_leaves, tree_map_tensors

log = logging.getLogger("engine")

REPEATS = 4
"""Passes; the first one makes buffers and warms caches and does not count."""


def times_of_layers(
    model: nn.Module, layers: Layers, plan: Plan, mesh: Mesh, sample: Any, loss_fn: Callable[..., Any] | None
) -> tuple[int, ...]:
    """See `measure_layers`; the same on all ranks. Times are those of the model as it was given, in its own dtype.

    Raises EngineError without a sample, and for a model without values.
    """
    if sample is None:
        raise EngineError(
            "pipeline.partition time: layers are timed on samples of the training data, and initialize() got none (a "
            'map-style dataset as training_data); use "parameters" or a list of counts'
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise EngineError(
            "pipeline.partition time: a model on the meta device has no values to run with; "
            'use "parameters" or a list of counts'
        )
    model.to(mesh.device)

    def loss_of() -> Tensor:
        loss = loss_with_batch(model, place(sample, mesh.device, None), loss_fn, mesh.device)
        return loss.total if isinstance(loss, LossSum) else loss

    wait = functools.partial(synchronize, mesh.device)
    times = agreed(measure_layers(model, layers, loss_of, autocast(plan.precision, mesh.device), wait), mesh)
    if mesh.rank == 0:
        slowest = max(range(len(layers.keys)), key=lambda at: times[1 + at])
        log.info(
            "pipeline.partition time: %.3g ms in front of the layers, %.3g ms behind them, at most %.3g ms in one (%s)",
            times[0] / 1e6,
            times[-1] / 1e6,
            times[1 + slowest] / 1e6,
            layers.name(slowest),
        )
    return times


def measure_layers(
    model: nn.Module,
    layers: Layers,
    loss_of: Callable[[], Tensor],
    around: Callable[[], AbstractContextManager[Any]],
    wait: Callable[[], None] = lambda: None,
) -> list[int]:
    """Nanoseconds of what is in front of the layers, of each layer, and of what is behind them.

    The least of a few passes. ``loss_of`` runs the model on a batch, inside ``around``; ``wait`` until the device has
    done all. Only one layer's activations live at a time. The model stays as it is: no gradient is left behind, buffers
    and random streams are put back.
    """
    passes = []
    with _unchanged(model), same_generators(next(model.parameters()).device), torch.enable_grad():
        for _ in range(REPEATS):
            passes.append(_Pass(model, layers, wait).run(loss_of, around))
    return [min(times) for times in zip(*passes[1:], strict=True)]


def agreed(times: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The mean over all ranks, which must cut alike."""
    total = torch.tensor([float(each) for each in times], dtype=torch.float64)
    total = ShardGroup.of(mesh, "control", Ledger()).sum(total, mesh.device if mesh.device.type != "cpu" else None)
    return tuple(round(each / mesh.world_size) for each in total.tolist())


class _Pass:
    def __init__(self, model: nn.Module, layers: Layers, wait: Callable[[], None]) -> None:
        self._model, self._pieces, self._wait = model, layers.modules, wait
        self._inside = {p for piece in self._pieces for p in piece.parameters()}
        self._times = [0] * (len(self._pieces) + 2)
        self._started = 0
        self._leaves: list[Tensor] = []
        self._position = 0

    def run(self, loss_of: Callable[[], Tensor], around: Callable[[], AbstractContextManager[Any]]) -> list[int]:
        handles = []
        for piece in dict.fromkeys(self._pieces):
            handles.append(piece.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(piece.register_forward_hook(self._leave))
        try:
            self._start()
            with around():
                loss = loss_of()
            self._stop(-1)
            if self._position != len(self._pieces):
                raise EngineError(
                    f"pipeline.partition time: the model called {self._position} of its {len(self._pieces)} layers; "
                    'use "parameters" or a list of counts'
                )
            self._backward([loss], -1, self._outside())
        finally:
            for handle in handles:
                handle.remove()
        return self._times

    def _start(self) -> None:
        self._wait()
        self._started = time.perf_counter_ns()

    def _stop(self, slot: int) -> None:
        self._wait()
        self._times[slot] += time.perf_counter_ns() - self._started

    def _outside(self) -> list[Tensor]:
        return [p for p in self._model.parameters() if p not in self._inside]

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._position == 0:
            self._stop(0)
            self._backward(_wanting((args, kwargs)), 0, self._outside(), retain=True)
        fresh = tree_map_tensors(_leaf, (args, kwargs))
        self._leaves = _wanting(fresh)
        self._start()
        return fresh

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> Any:
        self._position += 1
        self._stop(self._position)
        self._backward(_wanting(output), self._position, layer.parameters())
        fresh = tree_map_tensors(_leaf, output)
        self._leaves = _wanting(fresh)
        self._start()
        return fresh

    def _backward(self, roots: Sequence[Tensor], slot: int, parameters: Iterable[Tensor], retain: bool = False) -> None:
        """As training computes it, but nothing is kept."""
        roots = [root for root in roots if root.grad_fn is not None]
        inputs = [*self._leaves, *(p for p in parameters if p.requires_grad)]
        if not roots or not inputs:
            return
        self._start()
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, inputs, ones, retain_graph=retain, allow_unused=True)
        self._stop(slot)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _wanting(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers (running statistics) and the mode are as they were afterwards."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was_training)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
