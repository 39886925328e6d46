"""DeepSpeed's learning-rate schedules as torch schedulers (JSON section ``scheduler``); OneCycle is in one_cycle.py.

Each is a closed form of k, the number of `step()` calls so far, one per applied optimizer step. DeepSpeed writes its
formulas in n = k - 1; they are kept as they are, so both warm-ups hold the minimum for the first two optimizer steps
(k = 0 and k = 1). A bound may be one number or a list with one number per parameter group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from engine.contracts import EngineError

PerGroup = float | Sequence[float]


def per_group(name: str, value: PerGroup, optimizer: torch.optim.Optimizer) -> list[float]:
    """One float per parameter group; raises EngineError when a list has another length."""
    num_groups = len(optimizer.param_groups)
    if isinstance(value, (list, tuple)):
        if len(value) != num_groups:
            raise EngineError(
                f"scheduler.params.{name} lists {len(value)} values, but the optimizer has {num_groups} parameter "
                "groups; give one number, or one per group."
            )
        return [float(entry) for entry in value]
    return [float(value)] * num_groups  # type: ignore[arg-type]


def whole_number(name: str, value: float, minimum: int) -> int:
    """``value`` as an int of at least ``minimum``; 1e3 is accepted for 1000. Raises EngineError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < minimum:
        raise EngineError(
            f"scheduler.params.{name} must be a whole number of steps, at least {minimum}; it is {value!r}."
        )
    return int(value)


class ClosedFormSchedule(LRScheduler, ABC):
    """A schedule whose learning rates depend on nothing but k and its own parameters.

    Its state is k alone: after a restart the parameters of the current config hold. Subclasses give `lr_at` and set
    what it reads before they call this constructor, which applies k = ``last_batch_iteration`` + 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        super().__init__(optimizer)
        if last_batch_iteration >= 0:
            self._jump_to(last_batch_iteration + 1)

    @abstractmethod
    def lr_at(self, num_steps: int, group: int) -> float:
        """The learning rate of parameter group ``group`` after ``num_steps`` scheduler steps."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self.lr_at(self.last_epoch, group) for group in range(len(self.optimizer.param_groups))]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved k; DeepSpeed's own ``{"last_batch_iteration": n}`` is understood as well."""
        if "last_epoch" in state_dict:
            self._jump_to(int(state_dict["last_epoch"]))
        else:
            self._jump_to(int(state_dict["last_batch_iteration"]) + 1)

    def _jump_to(self, num_steps: int) -> None:
        self.last_epoch = num_steps
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(lr))
            else:
                group["lr"] = float(lr)
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


class ConstantSchedule(ClosedFormSchedule):
    """The neutral element: the learning rates stay what the optimizer, or the user by hand, makes them."""

    def lr_at(self, num_steps: int, group: int) -> float:
        return float(self.optimizer.param_groups[group]["lr"])

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class LRRangeTest(ClosedFormSchedule):
    """lr = min * (1 + rate * x), x = k / size, floored with ``staircase`` (Smith, arXiv 1506.01186).

    ``lr_range_test_growth`` "exponential": lr = min * (1 + rate)^x, equally long at every order of magnitude.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
        lr_range_test_growth: str = "linear",
    ) -> None:
        if lr_range_test_growth not in ("linear", "exponential"):
            raise EngineError(
                f'scheduler.params.lr_range_test_growth is "linear" or "exponential", not {lr_range_test_growth!r}.'
            )
        self._exponential = lr_range_test_growth == "exponential"
        self._min_lrs = per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self._size_steps = whole_number("lr_range_test_step_size", lr_range_test_step_size, 1)
        self._rate = float(lr_range_test_step_rate)
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def lr_at(self, num_steps: int, group: int) -> float:
        interval = num_steps // self._size_steps if self._staircase else num_steps / self._size_steps
        if self._exponential:
            return self._min_lrs[group] * (1.0 + self._rate) ** interval
        return self._min_lrs[group] * (1.0 + self._rate * interval)


def _logarithmic(n: int, warmup_steps: int) -> float:
    return math.log(n + 1) / math.log(warmup_steps)


def _linear(n: int, warmup_steps: int) -> float:
    return n / warmup_steps


_WARMUP_SHAPES: dict[str, Callable[[int, int], float]] = {"log": _logarithmic, "linear": _linear}


class _Warmup(ClosedFormSchedule):
    """What the three warm-up schedules share: g, the fraction of the warm-up done, from 0 to 1.

    ``warmup_num_steps`` 0 means no warm-up: g = 1 from the first step on. 1 and 2 are the same to DeepSpeed's formula,
    whose warm-up lasts max(2, warmup_num_steps) steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
        total_num_tokens: int | None = None,
    ) -> None:
        num_steps = whole_number("warmup_num_steps", warmup_num_steps, 0)
        self._warmup_steps = 0 if num_steps == 0 else max(2, num_steps)
        if warmup_type not in _WARMUP_SHAPES:
            raise EngineError(f'scheduler.params.warmup_type must be "log" or "linear"; it is {warmup_type!r}.')
        self._shape = _WARMUP_SHAPES[warmup_type]
        self._tokens = None if total_num_tokens is None else _TokenDecay(total_num_tokens, self._warmup_steps)
        super().__init__(optimizer, last_batch_iteration)

    def see_tokens(self, tokens_seen: int) -> None:
        """What the model has seen in the whole run, before the `step` of each applied step."""
        if self._tokens is not None:
            self._tokens.see(tokens_seen, self.last_epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        tokens = self._tokens
        seen = {} if tokens is None else {"tokens": [tokens.now, tokens.before, tokens.at_start]}
        return {**super().state_dict(), **seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state without tokens, of a decay in steps, leaves them to be seen: raises EngineError."""
        if self._tokens is not None:
            if "tokens" not in state_dict:
                raise EngineError(
                    "the checkpoint's learning-rate schedule counts steps, this run's total_num_tokens; use "
                    "total_num_steps, or load with load_lr_scheduler_states=False to start the schedule anew"
                )
            self._tokens.now, self._tokens.before, self._tokens.at_start = map(int, state_dict["tokens"])
        super().load_state_dict(state_dict)

    def _warmup(self, n: int) -> float:
        if n >= self._warmup_steps or self._warmup_steps == 0:
            return 1.0
        return self._shape(n, self._warmup_steps) if n >= 0 else 0.0


class _TokenDecay:
    """What a decay that follows tokens instead of steps knows (Li et al., arXiv 2108.06084).

    The warm-up stays a number of steps; the decay goes from the tokens that the model had seen when it was over to
    ``total_num_tokens``, those of the whole run. Where every step has equally many tokens, the learning rates are those
    of a decay in steps.
    """

    def __init__(self, total_num_tokens: int, warmup_steps: int) -> None:
        self._total = whole_number("total_num_tokens", total_num_tokens, 1)
        self._warmup_steps = warmup_steps
        self.now = self.before = self.at_start = 0

    def see(self, tokens_seen: int, num_steps: int) -> None:
        """After step ``num_steps``, before the scheduler moves."""
        self.before, self.now = self.now, tokens_seen
        if num_steps <= self._warmup_steps:
            self.at_start = tokens_seen

    def progress(self, lag: bool) -> float:
        """The part of the decay that is over after the last step, or, with ``lag``, after the one before it."""
        done = (self.before if lag else self.now) - self.at_start
        return min(1.0, max(0.0, done / max(1, self._total - self.at_start)))


def _check_one_total(total_num_steps: int | None, total_num_tokens: int | None) -> None:
    if total_num_steps is None and total_num_tokens is None:
        raise EngineError("scheduler.params.total_num_steps is missing (or total_num_tokens, for a decay in tokens)")
    if total_num_steps is not None and total_num_tokens is not None:
        raise EngineError(
            "scheduler.params has total_num_steps and total_num_tokens: a decay is measured in one of them; remove one"
        )


class WarmupLR(_Warmup):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: the optimizer's own lr), then constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._set_bounds(optimizer, warmup_min_lr, warmup_max_lr)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def _set_bounds(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: PerGroup, warmup_max_lr: PerGroup | None
    ) -> None:
        self._min_lrs = per_group("warmup_min_lr", warmup_min_lr, optimizer)
        if warmup_max_lr is None:
            self._max_lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        else:
            self._max_lrs = per_group("warmup_max_lr", warmup_max_lr, optimizer)

    def lr_at(self, num_steps: int, group: int) -> float:
        minimum, maximum = self._min_lrs[group], self._max_lrs[group]
        return minimum + (maximum - minimum) * self._fraction(num_steps - 1)

    def _fraction(self, n: int) -> float:
        return self._warmup(n)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line from the end of the warm-up to ``warmup_min_lr`` at n = ``total_num_steps``.

    ``total_num_steps`` counts optimizer steps, whatever the number of ranks and micro-batches. n lags one behind the
    steps done, so a run of exactly that many steps ends one step short of the minimum (as in DeepSpeed).
    With ``total_num_tokens`` in its place the line follows the tokens that the model has seen.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        total_num_tokens: int | None = None,
    ) -> None:
        _check_one_total(total_num_steps, total_num_tokens)
        self._total_steps = 0 if total_num_steps is None else whole_number("total_num_steps", total_num_steps, 1)
        self._set_bounds(optimizer, warmup_min_lr, warmup_max_lr)
        _Warmup.__init__(self, optimizer, warmup_num_steps, warmup_type, last_batch_iteration, total_num_tokens)

    def _fraction(self, n: int) -> float:
        if n < self._warmup_steps:
            return self._warmup(n)
        if self._tokens is not None:
            return 1.0 - self._tokens.progress(lag=True)
        left = (self._total_steps - n) / max(1, self._total_steps - self._warmup_steps)
        return min(1.0, max(0.0, left))


class WarmupCosineLR(_Warmup):
    """Ratios of the optimizer's lr: warm-up from ``warmup_min_ratio`` to 1, then half a cosine to ``cos_min_ratio``.

    The very first optimizer step (k = 0) has lr 0 unless there is no warm-up: DeepSpeed's behaviour.
    ``total_num_steps`` counts optimizer steps, whatever the number of ranks and micro-batches; the end ratio holds
    after exactly that many. With ``total_num_tokens`` in its place the cosine follows the tokens that were seen.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        total_num_tokens: int | None = None,
    ) -> None:
        _check_one_total(total_num_steps, total_num_tokens)
        self._total_steps = 0 if total_num_steps is None else whole_number("total_num_steps", total_num_steps, 1)
        self._warmup_min_ratio = float(warmup_min_ratio)
        self._cos_min_ratio = float(cos_min_ratio)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration, total_num_tokens)

    def lr_at(self, num_steps: int, group: int) -> float:
        return float(self.base_lrs[group]) * self._ratio(num_steps - 1)

    def _ratio(self, n: int) -> float:
        if n < self._warmup_steps and self._warmup_steps > 0:
            return self._warmup_min_ratio + (1.0 - self._warmup_min_ratio) * self._warmup(n) if n >= 0 else 0.0
        decay_steps = max(1, self._total_steps - self._warmup_steps)
        progress = min(1.0, (n - self._warmup_steps + 1) / decay_steps)
        if self._tokens is not None:
            progress = self._tokens.progress(lag=False)
        half_cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, self._cos_min_ratio + (1.0 - self._cos_min_ratio) * half_cosine)
