"""Faults to plant in a running pipeline: each must turn the comparison with one process red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import engine


def _runner(model_engine: engine.Engine) -> Any:
    return model_engine.roles.forward_backward


def shared_gradient_not_summed(model_engine: engine.Engine) -> None:
    model_engine.roles.reduction._sum = lambda mine, ranks: mine  # type: ignore[attr-defined]


def shared_gradient_twice(model_engine: engine.Engine) -> None:
    reduction: Any = model_engine.roles.reduction
    total = reduction._sum
    reduction._sum = lambda mine, ranks: 2 * total(mine, ranks)


def shared_norm_counted_twice(model_engine: engine.Engine) -> None:
    reduction: Any = model_engine.roles.reduction
    reduction.sum_of_squares = reduction._inner.sum_of_squares


def micro_batches_in_another_order(model_engine: engine.Engine) -> None:
    """The last stage takes the hidden states of one micro-batch for those of another."""
    runner = _runner(model_engine)
    train, transfers = runner.train, runner._transfers
    send, receive = transfers.send_output, transfers.receive_form
    transfers.send_output = lambda stage, index, kind, form, tensors, checksum: send(
        stage, index, kind, form, tensors, 0
    )
    transfers.receive_form = lambda stage, index, kind, checksum: receive(stage, index, kind, 0)

    def turned_round(one: Any, next_batch: Callable[[int], Any]) -> None:
        batches = [next_batch(index) for index in range(model_engine.gradient_accumulation_steps())]
        train(one, lambda index: batches[-1 - index])

    if model_engine.mesh.coordinates["pp"] == model_engine.mesh.degrees["pp"] - 1:
        runner.train = turned_round


def wrong_loss_divisor(model_engine: engine.Engine) -> None:
    runner = _runner(model_engine)
    take = runner._take_loss
    runner._take_loss = lambda one, output, batch, passage, number: take(one, output, batch, passage, number + 1)


def gradient_of_hidden_states_lost(model_engine: engine.Engine) -> None:
    transfers = _runner(model_engine)._transfers
    send = transfers.send_gradients
    transfers.send_gradients = lambda stage, index, gradients: send(
        stage, index, [torch.zeros_like(g) if index == 1 else g for g in gradients]
    )


def one_stage_not_updated(model_engine: engine.Engine) -> None:
    assert model_engine.optimizer is not None
    if model_engine.mesh.coordinates["pp"] == 1:
        model_engine.optimizer.apply = lambda gradient_factor=1.0: None  # type: ignore[method-assign]


def loss_counted_on_one_stage(model_engine: engine.Engine) -> None:
    """The mean over all ranks of a loss that only the last stage has."""
    runner = _runner(model_engine)
    take = runner._take_loss

    def once(one: Any, output: Any, batch: Any, passage: Any, number: int) -> None:
        runner._num_ranks = 1
        try:
            take(one, output, batch, passage, number)
        finally:
            runner._num_ranks = model_engine.mesh.degrees["pp"]

    runner._take_loss = once


def clipping_by_the_stage(model_engine: engine.Engine) -> None:
    clipping, reduction = model_engine.roles.clipping, model_engine.roles.reduction
    coefficient = clipping.coefficient

    def own(norm: float) -> float:
        return coefficient(reduction.sum_of_squares().sqrt().item() / reduction.divisor)

    clipping.coefficient = own  # type: ignore[method-assign]


def second_part_left_out(model_engine: engine.Engine) -> None:
    """The weights' half of a split backward is forgotten for one micro-batch."""
    runner = _runner(model_engine)
    backward = runner._run_backward
    calls = [0]

    def forgetful(one: Any, passage: Any) -> None:
        calls[0] += 1
        if calls[0] != 2:
            backward(one, passage)

    runner._run_backward = forgetful


FAULTS = {
    plant.__name__: plant
    for plant in (
        shared_gradient_not_summed,
        shared_gradient_twice,
        shared_norm_counted_twice,
        micro_batches_in_another_order,
        wrong_loss_divisor,
        gradient_of_hidden_states_lost,
        one_stage_not_updated,
        loss_counted_on_one_stage,
        clipping_by_the_stage,
        second_part_left_out,
    )
}
