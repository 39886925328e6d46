"""Faults to plant in a running engine: each is a mistake that a distributed engine can make.

``FAULTS[name](model_engine)`` breaks one thing on every rank. A comparison that does not notice it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import engine

TIED = "token_embedding.weight"
LOSS_SCALE = 8.0


@dataclass(frozen=True)
class Fault:
    """``stages``: where the mistake can be made at all."""

    plant: Callable[[engine.Engine], None]
    stages: tuple[int, ...] = (0, 1, 2, 3)

    def __call__(self, model_engine: engine.Engine) -> None:
        self.plant(model_engine)


class NoWork:
    def wait(self) -> None:
        pass


def _groups(reduction: Any) -> list[Any]:
    """The process groups through which gradients of this stage travel."""
    if hasattr(reduction, "shard_group"):
        return [reduction.shard_group, reduction.replicate_group]
    return [reduction._group]


def _after_finish(model_engine: engine.Engine, change: Callable[[list[Any]], None]) -> None:
    """Call ``change(shards)`` between the reduction and everything that reads its result."""
    reduction: Any = model_engine.roles.reduction
    finish = reduction.finish

    def finish_and_change() -> None:
        finish()
        change([shard for shard in reduction.shards if shard.parameter.grad is not None])

    reduction.finish = finish_and_change


def missing_reduction(model_engine: engine.Engine) -> None:
    for group in _groups(model_engine.roles.reduction):
        group.reduce_scatter = lambda flat, bounds, what="": NoWork()
        group.all_reduce = lambda flat, what="": NoWork()


def wrong_divisor(model_engine: engine.Engine) -> None:
    model_engine.roles.reduction.divisor *= model_engine.mesh.dp_size


def accumulation_not_divided(model_engine: engine.Engine) -> None:
    backward = model_engine.backward
    model_engine.backward = lambda loss: backward(loss, scale_wrt_gas=False)  # type: ignore[method-assign]


def last_micro_batch_only(model_engine: engine.Engine) -> None:
    backward, reduction = model_engine.backward, model_engine.roles.reduction

    def forgetful(loss: Tensor) -> Tensor:
        reduction.zero_gradients()
        return backward(loss)

    model_engine.backward = forgetful  # type: ignore[method-assign, assignment]


def clipping_with_local_norm(model_engine: engine.Engine) -> None:
    clipping, reduction = model_engine.roles.clipping, model_engine.roles.reduction
    coefficient = clipping.coefficient

    def local(norm: float) -> float:
        return coefficient(math.sqrt(reduction.sum_of_squares().item()) / reduction.divisor)

    clipping.coefficient = local  # type: ignore[method-assign]


def norm_of_one_rank(model_engine: engine.Engine) -> None:
    reduction = model_engine.roles.reduction
    share = reduction.sum_of_squares

    def of_first_rank(exact: bool = False) -> Tensor:
        return share(exact) * (model_engine.mesh.rank == 0)

    reduction.sum_of_squares = of_first_rank  # type: ignore[method-assign]


def tied_gradient_twice(model_engine: engine.Engine) -> None:
    def double(shards: list[Any]) -> None:
        for shard in shards:
            if shard.info.name == TIED:
                shard.parameter.grad.mul_(2)

    _after_finish(model_engine, double)


def publish_left_out(model_engine: engine.Engine) -> None:
    model_engine.roles.reduction.publish = lambda: None  # type: ignore[method-assign]


def gradients_not_zeroed(model_engine: engine.Engine) -> None:
    left: dict[str, Tensor] = {}

    def add_what_is_left(shards: list[Any]) -> None:
        for shard in shards:
            if shard.info.name in left:
                shard.parameter.grad.add_(left[shard.info.name])
            left[shard.info.name] = shard.parameter.grad.clone()

    _after_finish(model_engine, add_what_is_left)


def gradient_of_another_shard(model_engine: engine.Engine) -> None:
    def swap(shards: list[Any]) -> None:
        by_shape: dict[torch.Size, Any] = {}
        for shard in shards:
            other = by_shape.setdefault(shard.parameter.shape, shard)
            if other is not shard:
                mine, theirs = shard.parameter.grad.clone(), other.parameter.grad.clone()
                shard.parameter.grad.copy_(theirs)
                other.parameter.grad.copy_(mine)
                return
        raise AssertionError("no two shards of one shape: this model cannot show the fault")

    _after_finish(model_engine, swap)


def shard_border_off_by_one(model_engine: engine.Engine) -> None:
    def shift(shards: list[Any]) -> None:
        largest = max(shards, key=lambda shard: shard.parameter.numel())
        flat = largest.parameter.grad.view(-1)
        flat.copy_(flat.roll(1))

    _after_finish(model_engine, shift)


def weight_decay_twice(model_engine: engine.Engine) -> None:
    assert model_engine.optimizer is not None
    for group in model_engine.optimizer.param_groups:
        group["weight_decay"] *= 2


def loss_scale_not_removed(model_engine: engine.Engine) -> None:
    model_engine.roles.precision.scale = LOSS_SCALE
    model_engine.roles.reduction.divisor /= LOSS_SCALE


def one_rank_not_updated(model_engine: engine.Engine) -> None:
    assert model_engine.optimizer is not None
    if model_engine.mesh.rank == 1:
        model_engine.optimizer.apply = lambda gradient_factor=1.0: None  # type: ignore[method-assign]


def ranks_start_unequal(model_engine: engine.Engine) -> None:
    with torch.no_grad():
        for shard in model_engine.roles.reduction.shards:  # type: ignore[attr-defined]
            shard.parameter.add_(1e-3 * model_engine.mesh.rank)
    model_engine.roles.reduction.publish()


FAULTS = {
    plant.__name__: Fault(plant)
    for plant in (
        missing_reduction,
        wrong_divisor,
        accumulation_not_divided,
        last_micro_batch_only,
        clipping_with_local_norm,
        tied_gradient_twice,
        gradients_not_zeroed,
        gradient_of_another_shard,
        shard_border_off_by_one,
        weight_decay_twice,
        loss_scale_not_removed,
        one_rank_not_updated,
        ranks_start_unequal,
    )
}
FAULTS["norm_of_one_rank"] = Fault(norm_of_one_rank)
FAULTS["publish_left_out"] = Fault(publish_left_out, stages=(1, 2))  # elsewhere masters are what forward reads
