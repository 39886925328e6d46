"""0/1 Adam (JSON ``optimizer.type`` ``ZeroOneAdam``; Lu et al., arXiv 2202.06009), in the form that was published with
its results: one phase with 1-bit gradients, then one with local steps.

Phase A, steps 1 to ``var_freeze_step``. At refreshes, which grow rare, g is the mean gradient in full precision:

    v = b2 v + (1 - b2) g^2;   m = b1 m + (1 - b1) g

and else m = b1 m + (1 - b1) CAR_i(g_i), with v as it is. In both cases p -= lr (m / (sqrt(v) + eps) + weight_decay p).

Phase B, v frozen; the errors of CAR start anew, for another quantity travels. Between two synchronisations rank i steps
alone, and u_i is what it added to the point p_0 where all ranks were together:

    m_i = b1 m_i + (1 - b1) g_i;   u_i = (1 - lr wd) u_i - lr m_i / (sqrt(v) + eps);   p_0 = (1 - lr wd) p_0
    L = (1 - lr wd) L + lr;        p_i = p_0 + u_i

At a synchronisation W = CAR_i((sqrt(v) + eps) u_i), p = p_0 + W / (sqrt(v) + eps), m = -W / L: the momentum is the
mean over ranks of the lr-weighted mean over the interval. The steps of refreshes and synchronisations:
`engine.plan.one_bit.RoundSchedule`. CAR is as in engine/optim/onebit_adam.py.
``compat="deepspeed"``: weight decay is part of u_i, so it comes back a second time through m.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.collectives.compressed_all_reduce import Range
from engine.optim.compressed import CompressedOptimizer, Flat, Kept
from engine.plan.one_bit import RoundSchedule

_COUNTERS = ("variance_interval", "num_refreshes", "num_refreshes_in_all", "local_interval", "num_local_steps")


class ZeroOneAdam(CompressedOptimizer):
    """Adam that sends 1 bit or nothing in most steps. See `CompressedOptimizer` for what is not explained here.

    Between synchronisations ranks hold different parameters; `settle` brings them together, and a save does so first.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        **compression: Any,
    ) -> None:
        lengths = (var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
        if min(lengths) < 1:
            raise ValueError(
                "var_freeze_step, var_update_scaler, local_step_scaler and local_step_clipper must be at least 1"
            )
        self._rounds = RoundSchedule(*lengths)
        counters = {name: getattr(self._rounds, name) for name in _COUNTERS}
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **counters},
            **compression,
        )

    def _schedule(self) -> RoundSchedule:
        """The counters lie in the parameter groups, where checkpoints find them."""
        for name in _COUNTERS:
            setattr(self._rounds, name, self.param_groups[0][name])
        return self._rounds

    def stays_local(self, flat: Flat) -> bool:
        return not flat.options.get("non_freeze") and not self._schedule().refreshes(self.num_steps + 1)

    def num_variance_updates(self, flat: Flat) -> int:
        step = self.num_steps + 1
        if flat.options.get("non_freeze"):
            return step
        return self._rounds.num_refreshes_in_all + self._rounds.refreshes(step)

    def scalars(self) -> Mapping[str, float]:
        return {
            "Train/compression_stage": float(self._rounds.is_local(self.num_steps)),
            "Train/local_step_interval": float(self._schedule().local_interval),
        }

    def update(self, step: int) -> None:
        schedule = self._schedule()
        compressed = [flat for flat in self.flats if not flat.options.get("non_freeze")]
        if step == schedule.var_freeze_step + 1:
            self.announce(
                f"step {step}: the variance is frozen; from here on ranks step alone and synchronise in 1 bit"
            )
            for flat in compressed:
                collective = self.collective_of(flat)
                collective.worker_error.zero_()
                collective.server_error.zero_()
        for flat in self.flats:
            if flat not in compressed or schedule.refreshes(step):
                self._refresh(flat, step)
        if schedule.is_local(step):
            for flat in compressed:
                self._step_alone(flat, step)
            if schedule.synchronises(step):
                self._synchronise(compressed)
        elif not schedule.refreshes(step):
            self._step_on_signs(compressed, step)
        schedule.advance(step)
        for group in self.param_groups:
            group.update({name: getattr(schedule, name) for name in _COUNTERS})

    # --- phase A ---------------------------------------------------------------------------------------------

    def _refresh(self, flat: Flat, step: int) -> None:
        kept = Kept(flat.absent(), flat.values, flat.exp_avg, flat.exp_avg_sq)
        beta1, beta2 = flat.options["betas"]
        before = flat.denominator
        flat.exp_avg.lerp_(flat.gradients, 1.0 - beta1)
        flat.exp_avg_sq.mul_(beta2).addcmul_(flat.gradients, flat.gradients, value=1.0 - beta2)
        flat.denominator = None
        if self._divides and flat.collective is not None and before is not None:
            flat.collective.rescale_errors(before.div_(self.divisor(flat)))  # they are in units of the update
        self._apply(flat, step)
        kept.restore()

    def _step_on_signs(self, flats: Sequence[Flat], step: int) -> None:
        for flat in flats:
            # a momentum is at most as large as the gradients that it averages
            self.bound(flat, flat.gradients, factor=1.0 / (1.0 - flat.options["betas"][0]))
        for flat, gradients in self.reduce([(flat, flat.gradients, flat.absent()) for flat in flats]):
            kept = Kept(flat.absent(), flat.values, flat.exp_avg)
            flat.exp_avg.lerp_(gradients, 1.0 - flat.options["betas"][0])
            self._apply(flat, step)
            kept.restore()

    def _apply(self, flat: Flat, step: int) -> None:
        flat.values.mul_(1.0 - float(flat.options["lr"]) * flat.options["weight_decay"])
        flat.values.addcdiv_(flat.exp_avg, self.divisor(flat), value=-self.step_size(flat, step))

    # --- phase B ---------------------------------------------------------------------------------------------

    def _step_alone(self, flat: Flat, step: int) -> None:
        if not flat.extra:
            zeros = torch.zeros_like(flat.exp_avg)
            sums = torch.zeros(len(flat.spans), dtype=torch.float32, device=zeros.device)
            flat.extra = {"start": torch.empty_like(zeros), "moved": zeros, "lr_sums": sums}
            flat.is_apart = False
        start, moved, sums = flat.extra["start"], flat.extra["moved"], flat.extra["lr_sums"]
        if not flat.is_apart:
            start.copy_(flat.values)  # not kept from the last synchronisation: the values may have been set since
            flat.is_apart = True
        lr, decay = float(flat.options["lr"]), flat.options["weight_decay"]
        kept = Kept(flat.absent(), flat.exp_avg, start, moved)
        sums_kept = Kept([(i, i + 1) for i in flat.absent_indices()], sums)
        flat.exp_avg.lerp_(flat.gradients, 1.0 - flat.options["betas"][0])
        self.bound(flat, flat.exp_avg)
        if self._deepspeed:
            moved.add_(flat.values, alpha=-lr * decay)
        else:
            for tensor in (start, moved, sums):
                tensor.mul_(1.0 - lr * decay)
        sums.add_(self.step_size(flat, step))
        moved.addcdiv_(flat.exp_avg, self.divisor(flat), value=-self.step_size(flat, step))
        kept.restore()
        sums_kept.restore()
        torch.add(start, moved, out=flat.values)

    def _synchronise(self, flats: Sequence[Flat]) -> None:
        held: dict[int, list[Range]] = {}
        for flat in flats:
            never = (flat.extra["lr_sums"] == 0.0).tolist()
            held[id(flat)] = [span for span, zero in zip(flat.spans, never, strict=True) if zero]
            flat.extra["moved"].mul_(self.divisor(flat))
        for flat, moved in self.reduce([(flat, flat.extra["moved"], held[id(flat)]) for flat in flats]):
            kept = Kept(held[id(flat)], flat.exp_avg, flat.values)
            torch.div(moved, flat.expand(flat.extra["lr_sums"]).neg_(), out=flat.exp_avg)
            torch.addcdiv(flat.extra["start"], moved, self.divisor(flat), out=flat.values)
            kept.restore()
            moved.zero_()
            flat.extra["lr_sums"].zero_()
            flat.is_apart = False

    @torch.no_grad()
    def settle(self) -> None:
        apart = [flat for flat in self.flats if flat.is_apart]
        if apart:
            self._synchronise(apart)
            self._publish()
