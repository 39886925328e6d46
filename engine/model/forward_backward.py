"""The `ForwardBackward` role of an engine whose ranks hold the whole depth of the model: one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.contracts import LossSum
from engine.data.batch import loss_with_batch


def total_and_count(loss: Tensor | LossSum) -> tuple[Tensor, Tensor | float]:
    """What a micro-batch adds to the numerator and to the denominator of an evaluation's mean, in fp32."""
    return (loss.total.float(), loss.count) if isinstance(loss, LossSum) else (loss.float(), 1.0)


class OneByOne:
    """The neutral element: what a script's own loop does with `Engine.backward` and `Engine.step`."""

    def by_hand(self, call: str) -> None: ...

    def train(self, engine: Any, next_batch: Callable[[int], Any]) -> None:
        for index in range(engine.gradient_accumulation_steps()):
            engine.backward(self._loss(engine, next_batch(index)))
            engine.step()

    def evaluate(self, engine: Any, next_batch: Callable[[int], Any], num_micro_batches: int) -> tuple[Any, Any]:
        total: Tensor | float = 0.0
        count: Tensor | float = 0.0
        for index in range(num_micro_batches):
            one, weight = total_and_count(self._loss(engine, next_batch(index)))
            total, count = total + one, count + weight
        return total, count

    def close(self) -> None: ...

    @staticmethod
    def _loss(engine: Any, batch: Any) -> Tensor | LossSum:
        return loss_with_batch(engine, batch, engine.roles.loss_fn, engine.device)
