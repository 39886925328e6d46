"""The 1-cycle schedule (JSON ``scheduler.type`` ``OneCycle``; Smith, arXiv 1803.09820 and 1708.07120)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine.contracts import EngineError
from engine.optim.schedules import ClosedFormSchedule, PerGroup, per_group, whole_number

_log = logging.getLogger(__name__)

DEEPSPEED_BETA2 = 0.99


class OneCycle(ClosedFormSchedule):
    """The learning rate goes min, max, min over one cycle, then decays; the momentum mirrors it: max, min, max.

    With k steps done and a cycle of S = S1 + S2 steps, for k <= S::

        f   = k / S1 in the first half, (S - k) / S2 in the second, each floored to its stairs when it has some
        lr  = min_lr + (max_lr - min_lr) * f          momentum = max_mom - (max_mom - min_mom) * f

    and for j = k - S > 0: lr = min_lr / (1 + decay_lr_rate * j / decay_step_size), momentum = max_mom *
    (1 + decay_mom_rate * j / decay_step_size); without rate or decay_step_size they stay.

    The momentum is the first of a group's ``betas``, else its ``momentum``; the second beta is left alone.
    ``compat="deepspeed"`` gives what DeepSpeed does: the second beta forced to 0.99, the momentum of the first step
    at its minimum although the learning rate is there too, and optimizers without betas not cycled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        compat: str | None = None,
    ) -> None:
        if compat not in (None, "deepspeed"):
            raise EngineError(f'scheduler.params.compat must be "deepspeed" or absent; it is {compat!r}.')
        self._min_lrs = per_group("cycle_min_lr", cycle_min_lr, optimizer)
        self._max_lrs = per_group("cycle_max_lr", cycle_max_lr, optimizer)
        self._min_momenta = per_group("cycle_min_mom", cycle_min_mom, optimizer)
        self._max_momenta = per_group("cycle_max_mom", cycle_max_mom, optimizer)
        first = whole_number("cycle_first_step_size", cycle_first_step_size, 1)
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self._first_steps, self._second_steps = first, whole_number("cycle_second_step_size", second, 0)
        first_stairs = whole_number("cycle_first_stair_count", cycle_first_stair_count, 0)
        second_stairs = first_stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self._first_stairs = first_stairs
        self._second_stairs = whole_number("cycle_second_stair_count", second_stairs, 0)
        self._decay_steps = whole_number("decay_step_size", decay_step_size, 0)
        self._decay_lr_rate, self._decay_mom_rate = float(decay_lr_rate), float(decay_mom_rate)
        self._deepspeed = compat == "deepspeed"
        self.cycle_momentum = cycle_momentum
        self._cycled = self._groups_with_momentum(optimizer) if cycle_momentum else []
        super().__init__(optimizer, last_batch_iteration)

    def _groups_with_momentum(self, optimizer: torch.optim.Optimizer) -> list[int]:
        keys = ("betas",) if self._deepspeed else ("betas", "momentum")
        cycled = [i for i, group in enumerate(optimizer.param_groups) if any(key in group for key in keys)]
        if len(cycled) < len(optimizer.param_groups):
            left_out = [i for i in range(len(optimizer.param_groups)) if i not in cycled]
            _log.warning(
                "OneCycle: parameter groups %s of %s have no %s, so their momentum is not cycled.",
                left_out, type(optimizer).__name__, " or ".join(keys),
            )  # fmt: skip
        return cycled

    def lr_at(self, num_steps: int, group: int) -> float:
        minimum, maximum = self._min_lrs[group], self._max_lrs[group]
        decayed_steps = num_steps - self._first_steps - self._second_steps
        if decayed_steps <= 0:
            return minimum + (maximum - minimum) * self._fraction(num_steps)
        return minimum / self._decay(self._decay_lr_rate, decayed_steps)

    def momentum_at(self, num_steps: int, group: int) -> float:
        """The momentum (beta1) of parameter group ``group`` after ``num_steps`` scheduler steps."""
        minimum, maximum = self._min_momenta[group], self._max_momenta[group]
        if self._deepspeed and num_steps == 0:
            return minimum
        decayed_steps = num_steps - self._first_steps - self._second_steps
        if decayed_steps <= 0:
            return maximum - (maximum - minimum) * self._fraction(num_steps)
        return maximum * self._decay(self._decay_mom_rate, decayed_steps)

    def _fraction(self, num_steps: int) -> float:
        """How far up the cycle is, 0 at its ends, 1 at its peak. Integers first: a stair begins on its exact step."""
        if num_steps <= self._first_steps and self._second_steps + self._first_steps > num_steps:
            done, size, stairs = num_steps, self._first_steps, self._first_stairs
        else:
            done = self._first_steps + self._second_steps - num_steps
            size, stairs = max(1, self._second_steps), self._second_stairs
        return (done * stairs // size) / stairs if stairs > 0 else done / size

    def _decay(self, rate: float, num_steps: int) -> float:
        return 1.0 + rate * num_steps / self._decay_steps if self._decay_steps > 0 else 1.0

    def get_lr(self) -> list[float | torch.Tensor]:
        # torch asks for the learning rates once per step and once at construction, so the momentum goes with them,
        # as in torch's own OneCycleLR.
        for index in self._cycled:
            self._set_momentum(self.optimizer.param_groups[index], self.momentum_at(self.last_epoch, index))
        return super().get_lr()

    def _set_momentum(self, group: dict[str, Any], momentum: float) -> None:
        if not self._deepspeed and not 0.0 <= momentum < 1.0:
            raise EngineError(
                f"OneCycle: the momentum after {self.last_epoch} steps would be {momentum:g}, outside [0, 1); "
                "lower scheduler.params.decay_mom_rate or raise decay_step_size."
            )
        if "betas" not in group:
            group["momentum"] = momentum
        elif self._deepspeed:
            group["betas"] = (momentum, DEEPSPEED_BETA2)
        else:
            group["betas"] = (momentum, *group["betas"][1:])
