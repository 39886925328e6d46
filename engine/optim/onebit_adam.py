"""1-bit Adam (JSON ``optimizer.type`` ``OneBitAdam``; Tang et al., arXiv 2102.02888).

Warm-up, steps 1 to ``freeze_step``; g is the mean gradient over ranks:

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   p -= lr (m / (sqrt(v) + eps) + weight_decay p)

Compression, from step ``freeze_step`` + 1 on; g_i is rank i's own gradient and v stays what it was:

    m = CAR_i(b1 m + (1 - b1) g_i);                     p -= lr (m / (sqrt(v) + eps) + weight_decay p)

CAR is the error-compensated 1-bit all-reduce (engine/collectives/compressed_all_reduce.py). There is no bias
correction, as in the paper. On one rank CAR is the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from engine.optim.compressed import CompressedOptimizer, Flat, Kept


class OneBitAdam(CompressedOptimizer):
    """Adam whose momentum travels in 1 bit per element once the variance is frozen. See `CompressedOptimizer`.

    ``eps_inside_sqrt``: sqrt(v + eps) as the divisor, the paper's notation (DeepSpeed ignores it).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        eps_inside_sqrt: bool = False,
        compression_unit: str = "bucket",
        compression_scale: str = "rms",
        compat: str | None = None,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"freeze_step must be at least 1, not {freeze_step}: no variance has been seen before it")
        self.freeze_step = freeze_step
        self._eps_inside_sqrt = eps_inside_sqrt and compat != "deepspeed"
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            compression_unit=compression_unit,
            compression_scale=compression_scale,
            compat=compat,
        )

    def stays_local(self, flat: Flat) -> bool:
        return self.num_steps >= self.freeze_step and not flat.options.get("non_freeze")

    def scalars(self) -> Mapping[str, float]:
        return {"Train/compression_stage": float(self.num_steps > self.freeze_step)}

    def update(self, step: int) -> None:
        if step == self.freeze_step + 1:
            self.announce(f"step {step}: the variance is frozen; from here on momentum travels in 1 bit per element")
        travelling = []
        kept = {}
        for flat in self.flats:
            absent = flat.absent()
            kept[id(flat)] = Kept(absent, flat.values, flat.exp_avg, flat.exp_avg_sq)
            beta1, beta2 = flat.options["betas"]
            flat.exp_avg.lerp_(flat.gradients, 1.0 - beta1)
            if self.stays_local(flat):
                travelling.append((flat, flat.exp_avg, absent))
                continue
            flat.exp_avg_sq.mul_(beta2).addcmul_(flat.gradients, flat.gradients, value=1.0 - beta2)
            self._apply(flat, self._denominator(flat))
        for flat, _ in self.reduce(travelling):
            if flat.denominator is None:
                flat.denominator = self._denominator(flat)
            self._apply(flat, flat.denominator)
        for saved in kept.values():
            saved.restore()

    def _denominator(self, flat: Flat) -> Tensor:
        eps = flat.options["eps"]
        return flat.exp_avg_sq.add(eps).sqrt_() if self._eps_inside_sqrt else flat.exp_avg_sq.sqrt().add_(eps)

    def _apply(self, flat: Flat, denominator: Tensor) -> None:
        lr = float(flat.options["lr"])
        values = flat.values
        if flat.options["weight_decay"]:
            values.mul_(1.0 - lr * flat.options["weight_decay"])
        values.addcdiv_(flat.exp_avg, denominator, value=-lr)
