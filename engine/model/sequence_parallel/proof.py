"""Before the first step: a few tokens, whole and in slices, must come out alike.

What looks along the sequence other than through attention cannot be seen from outside: positions that a model counts
by itself, labels that it shifts, convolutions, recurrences. Comparing tells all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.contracts import EngineError, LossSum
from engine.data.batch import scalar_loss
from engine.data.sequences import named_tensors, truncate
from engine.model.sequence_parallel.attention import SWITCH_OFF
from engine.model.sequence_parallel.losses import IGNORED

if TYPE_CHECKING:
    from engine.model.sequence_parallel.slices import SequenceSlices

TOKENS_A_UNIT = 8
"""The proof takes so many times the shortest sequence that can be cut."""
TOLERANCE = 1e-3
TOLERANCE_OF_16_BIT = 5e-2
"""Of outputs against the largest of them, and of the loss."""


class Proof:
    def __init__(self, slices: SequenceSlices, ledger: Ledger) -> None:
        self._slices, self._ledger = slices, ledger
        self.is_done = False

    def run(self, model: Callable[..., Any], batch: dict[str, Any], shape: tuple[int, int]) -> None:
        """Raises EngineError, on all ranks of the slices alike, where the model gives something else on slices.

        Labels count at the borders of slices alone, so that one that is lost there is the whole loss.
        """
        assert isinstance(model, nn.Module)
        slices = self._slices
        length = min(shape[1], slices.layout.unit * TOKENS_A_UNIT)
        short = self._with_border_labels(truncate(batch, slices.dimensions(batch, shape), length), length)
        short_shape = shape[0], length
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad(), self._ledger.apart("start"):
                whole = model(**slices.without_cache(short))
                sliced = slices.on_slice(model, short, short_shape)
                difference = self._difference(whole, sliced, length)
        finally:
            for module, was_training in training.items():
                module.training = was_training
        self.is_done = True
        if difference is not None:
            raise EngineError(
                f"sequence parallel: {slices.name} gives something else on slices than on whole sequences, tried with "
                f"{length} tokens: {difference}. It may count positions by itself instead of taking position_ids, "
                "shift labels by itself without taking shift_labels, make a mask from the number of its tokens, or "
                "look along the sequence outside of attention (convolutions, recurrences). Let it take position_ids "
                f"and labels that are shifted already, or {SWITCH_OFF}"
            )

    def _with_border_labels(self, batch: dict[str, Any], length: int) -> dict[str, Any]:
        """Labels everywhere but at the first tokens of slices are left out of the loss."""
        layout = self._slices.layout
        owners = torch.empty(length, dtype=torch.int64)
        for cp_rank in range(layout.cp):
            for sp_rank, indices in enumerate(layout.part_indices(length, cp_rank).chunk(layout.sp)):
                owners[indices] = cp_rank * layout.sp + sp_rank
        is_border = torch.cat([torch.zeros(1, dtype=torch.bool), owners[1:] != owners[:-1]])
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape[-1] != length:
            return batch
        return {**batch, "labels": labels.masked_fill(~is_border.to(labels.device), IGNORED)}

    def _difference(self, whole: Any, sliced: Any, length: int) -> str | None:
        """What came out otherwise, on any rank of the slices; the same text on all of them."""
        slices = self._slices
        tolerance = TOLERANCE_OF_16_BIT if slices.is_16_bit else TOLERANCE
        worst = 0.0
        own_outputs = named_tensors(sliced)
        for name, output in named_tensors(whole).items():
            own = own_outputs.get(name)
            if own is None or not output.is_floating_point() or output.ndim < 2 or output.shape[1] != length:
                continue
            expected = output.index_select(1, slices.layout.slice_indices(length, output.device))
            if own.shape == expected.shape:
                scale = float(expected.abs().max()) or 1.0
                worst = max(worst, float((own - expected).abs().max()) / scale)
        layout = slices.layout
        by_slice = torch.zeros(layout.num_slices, dtype=torch.float64, device=slices.device)
        by_slice[layout.cp_rank * layout.sp + layout.sp_rank] = worst
        for group in slices.groups:
            group.all_reduce(by_slice, "the proof of slices").wait()
        worst = float(by_slice.max())
        if not worst <= tolerance:
            return f"its outputs differ, by {worst:.2g} of the largest"
        return self._loss_difference(scalar_loss(whole), scalar_loss(sliced), tolerance)

    def _loss_difference(
        self, whole: Tensor | LossSum | None, sliced: Tensor | LossSum | None, tolerance: float
    ) -> str | None:
        if whole is None or sliced is None or isinstance(whole, LossSum) != isinstance(sliced, LossSum):
            return None
        if isinstance(whole, LossSum):
            assert isinstance(sliced, LossSum)
            sums = torch.stack([sliced.total.detach().double().cpu(), torch.as_tensor(sliced.count).double().cpu()])
            sums = sums.to(self._slices.device)
            for group in self._slices.groups:
                group.all_reduce(sums, "the proof of slices").wait()
            found, expected = float(sums[0] / sums[1]), float(whole.total) / float(whole.count)
        else:
            assert isinstance(sliced, Tensor)
            found, expected = float(sliced), float(whole)
        if math.isfinite(expected) and not abs(found - expected) <= tolerance * max(1.0, abs(expected)):
            return f"the loss at the borders of slices is {found:.6g}, not {expected:.6g}"
        return None
