"""The `ForwardBackward` role of an engine whose ranks hold the whole depth of the model: one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.contracts import LossSum
from engine.data.batch import loss_with_batch


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
            loss = self._loss(engine, next_batch(index))
            is_sum = isinstance(loss, LossSum)
            total = total + (loss.total if isinstance(loss, LossSum) else loss).float()
            count = count + (loss.count if is_sum else 1.0)  # type: ignore[union-attr]
        return total, count

    def close(self) -> None: ...

    @staticmethod
    def _loss(engine: Any, batch: Any) -> Tensor | LossSum:
        return loss_with_batch(engine, batch, engine.roles.loss_fn, engine.device)
