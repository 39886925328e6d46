"""1-bit Adam (JSON ``optimizer.type`` ``OneBitAdam``; Tang et al., arXiv 2102.02888).

Warm-up, steps 1 to ``freeze_step``; g is the mean gradient over ranks:

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   p -= lr (m / (sqrt(v) + eps) + weight_decay p)

Compression, from step ``freeze_step`` + 1 on; g_i is rank i's own gradient and v stays what it was:

    m = CAR_i(b1 m + (1 - b1) g_i);                     p -= lr (m / (sqrt(v) + eps) + weight_decay p)

CAR is the error-compensated 1-bit all-reduce (engine/collectives/compressed_all_reduce.py). By
default it is taken in units of the update: CAR(x) stands for d CAR(x / d), d = sqrt(v) + eps (see `CompressedOptimizer`
for why, and for the paper's own). There is no bias correction unless asked for, as in the paper. On one rank CAR is the
identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from engine.optim.compressed import Flat, Kept
from engine.optim.frozen_variance import FrozenVariance


class OneBitAdam(FrozenVariance):
    """Adam whose momentum travels in 1 bit per element once the variance is frozen. See `CompressedOptimizer`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        **compression: Any,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            freeze_step=freeze_step,
            **compression,
        )

    def update(self, step: int) -> None:
        self.begins_compression(step)
        travelling, kept = [], []
        for flat in self.flats:
            absent = flat.absent()
            kept.append(Kept(absent, flat.values, flat.exp_avg, flat.exp_avg_sq))
            beta1, beta2 = flat.options["betas"]
            flat.exp_avg.lerp_(flat.gradients, 1.0 - beta1)
            if self.stays_local(flat):
                self.bound(flat, flat.exp_avg)
                travelling.append((flat, flat.exp_avg, absent))
                continue
            flat.exp_avg_sq.mul_(beta2).addcmul_(flat.gradients, flat.gradients, value=1.0 - beta2)
            flat.denominator = None
            self._apply(flat, step)
        for flat, _ in self.reduce(travelling):
            self._apply(flat, step)
        for saved in kept:
            saved.restore()

    def _apply(self, flat: Flat, step: int) -> None:
        if flat.options["weight_decay"]:
            flat.values.mul_(1.0 - float(flat.options["lr"]) * flat.options["weight_decay"])
        flat.values.addcdiv_(flat.exp_avg, self.divisor(flat), value=-self.step_size(flat, step))
