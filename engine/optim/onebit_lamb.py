"""1-bit LAMB (JSON ``optimizer.type`` ``OneBitLamb``; Li et al., arXiv 2104.06069).

Warm-up, steps 1 to ``freeze_step``, is Lamb without bias correction; g is the mean gradient, l a parameter tensor:

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   u = m / (sqrt(v) + eps) + weight_decay p
    c_l = clip(|p_l| / |u_l|, min_coeff, max_coeff), 1 where a norm is 0;   p -= lr c_l u
    where c_l is not 1: C_l = coeff_beta C_l + (1 - coeff_beta) c_l

At the switch v is frozen, w = v, and k_l = mean_j(RMS(m_j)) / RMS(m_l) makes the momenta of all tensors equally large,
so that one scale fits them. Compression; CAR is the error-compensated 1-bit all-reduce:

    m' = CAR_i(k (b1 m + (1 - b1) g_i)) / k;   g = (m' - b1 m) / (1 - b1);   w = b2 w + (1 - b2) g^2;   m = m'
    r_l = max_l((sqrt(v) + eps) / (sqrt(w) + eps)), with weight decay r_l rho + 1 - rho, rho = min(1, |a| / |u|)
    r_l clipped to [factor_min, factor_max], then to [1 - factor_threshold, 1 + factor_threshold] times its last value
    p -= lr C_l r_l u,   a = m / (sqrt(v) + eps), u = a + weight_decay p
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.optim.compressed import CompressedOptimizer, Flat, Kept
from engine.optim.frozen_variance import FrozenVariance
from engine.torch_compat import foreach_max, foreach_norm


class OneBitLamb(FrozenVariance):
    """Lamb whose momentum travels in 1 bit per element. See `CompressedOptimizer` for what is not explained here.

    A tensor whose trust ratio was 1 throughout the warm-up (its values or updates were all zero) keeps the ratio 1
    (``compat="deepspeed"``: 0, so that it never moves again). ``get_lamb_coeffs()`` has the last step's coefficients.
    """

    PER_ELEMENT: Mapping[str, float] = {**CompressedOptimizer.PER_ELEMENT, "exp_avg_sq_fresh": 0.0}
    PER_PARAMETER: Mapping[str, float] = {"coeff_average": 0.0, "last_factor": 1.0, "momentum_scale": 1.0}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **compression: Any,
    ) -> None:
        if not 0.0 <= min_coeff <= max_coeff or not 0.0 <= factor_min <= factor_max or not 0.0 <= coeff_beta < 1.0:
            raise ValueError("min_coeff <= max_coeff, factor_min <= factor_max and 0 <= coeff_beta < 1 must hold")
        self._ratio_bounds, self._coeff_beta = (min_coeff, max_coeff), coeff_beta
        self._factor_bounds, self._factor_threshold = (factor_min, factor_max), factor_threshold
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            freeze_step=freeze_step,
            **compression,
        )

    def get_lamb_coeffs(self) -> list[float]:
        """What the updates of the last step were multiplied by, in the order of the groups; 1.0 before the first."""
        found: dict[str, float] = {}
        for flat in self.flats:
            used = flat.coefficients.tolist() if flat.coefficients is not None else [1.0] * len(flat.names)
            found |= dict(zip(flat.names, used, strict=True))
        return [found.get(name, 1.0) for group in self.param_groups for name in group["param_names"]]

    # --- the step --------------------------------------------------------------------------------------------

    def update(self, step: int) -> None:
        if self.begins_compression(step):
            self._enter_compression([flat for flat in self.flats if self.stays_local(flat)])
        travelling, before, kept = [], {}, []
        for flat in self.flats:
            absent = flat.absent()
            state = [flat.state["exp_avg_sq_fresh"]] if self.stays_local(flat) else []
            kept.append(Kept(absent, flat.values, flat.exp_avg, flat.exp_avg_sq, *state))
            kept.append(
                Kept([(i, i + 1) for i in flat.absent_indices()], *(flat.state[key] for key in self.PER_PARAMETER))
            )
            if not self.stays_local(flat):
                self._step_dense(flat, step)
                continue
            before[id(flat)] = flat.exp_avg.clone()
            flat.exp_avg.lerp_(flat.gradients, 1.0 - flat.options["betas"][0])
            self.bound(flat, flat.exp_avg)
            flat.exp_avg.mul_(flat.expand(flat.state["momentum_scale"]))
            travelling.append((flat, flat.exp_avg, absent))
        for flat, momentum in self.reduce(travelling):
            momentum.div_(flat.expand(flat.state["momentum_scale"]))
            self._step_compressed(flat, before[id(flat)], step)
        for saved in kept:
            saved.restore()

    def _step_dense(self, flat: Flat, step: int) -> None:
        beta1, beta2 = flat.options["betas"]
        flat.exp_avg.lerp_(flat.gradients, 1.0 - beta1)
        flat.exp_avg_sq.mul_(beta2).addcmul_(flat.gradients, flat.gradients, value=1.0 - beta2)
        flat.denominator = None
        update = self._direction(flat, step)
        if flat.options["weight_decay"]:
            update.add_(flat.values, alpha=flat.options["weight_decay"])
        weight_norms, update_norms = _norms(flat, flat.values), _norms(flat, update)
        defined = (weight_norms > 0.0) & (update_norms > 0.0)
        ratios = torch.where(defined, (weight_norms / update_norms).clamp(*self._ratio_bounds), 1.0)
        average = flat.state["coeff_average"]
        moved = self._coeff_beta * average + (1.0 - self._coeff_beta) * ratios
        average.copy_(torch.where(ratios != 1.0, moved, average))
        self._apply(flat, update, ratios)

    def _enter_compression(self, flats: Sequence[Flat]) -> None:
        roots = []
        for flat in flats:
            flat.state["exp_avg_sq_fresh"].copy_(flat.exp_avg_sq)
            travelling = flat.exp_avg / self.divisor(flat) if self._divides else flat.exp_avg
            roots.append(_norms(flat, travelling) / flat.lengths.sqrt())
            if not self._deepspeed:
                average = flat.state["coeff_average"]
                average.copy_(torch.where(average == 0.0, 1.0, average))
        mean = self._mean_over_stages(flats, roots)
        for flat, root in zip(flats, roots, strict=True):
            flat.state["momentum_scale"].copy_(torch.where(root > 0.0, mean / root, 1.0))

    def _mean_over_stages(self, flats: Sequence[Flat], roots: Sequence[Tensor]) -> Tensor:
        """Of the roots above zero of all parameters of the model; 0-dim. Every pipeline rank comes here."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.flats[0].exp_avg.device)
        for flat, root in zip(flats, roots, strict=True):
            shares = sums.new_tensor([self._stages.share(shard.info.index) for shard, _ in flat.bucket.shards])
            sums += torch.stack([(root * shares).sum(), (shares * (root > 0.0)).sum()])
        total, count = self._stages.group.sum(sums)
        return (total / count).float()

    def _step_compressed(self, flat: Flat, before: Tensor, step: int) -> None:
        beta1, beta2 = flat.options["betas"]
        decay, fresh = flat.options["weight_decay"], flat.state["exp_avg_sq_fresh"]
        gradients = before.mul_(-beta1).add_(flat.exp_avg).div_(1.0 - beta1)
        fresh.mul_(beta2).addcmul_(gradients, gradients, value=1.0 - beta2)
        factors = self.divisor(flat) / self.root(flat, fresh, step)
        largest = torch.stack(foreach_max(flat.views(factors)))
        update = self._direction(flat, step)
        if decay:
            plain_norms = _norms(flat, update)
            update.add_(flat.values, alpha=decay)
            update_norms = _norms(flat, update)
            rho = torch.where(update_norms > 0.0, plain_norms / update_norms, 1.0).clamp(max=1.0)
            largest = largest * rho + (1.0 - rho)
        last = flat.state["last_factor"]
        factor = largest.clamp(*self._factor_bounds)
        factor = factor.clamp(last * (1.0 - self._factor_threshold), last * (1.0 + self._factor_threshold))
        last.copy_(factor)
        self._apply(flat, update, flat.state["coeff_average"] * factor)

    def _direction(self, flat: Flat, step: int) -> Tensor:
        lr = float(flat.options["lr"])
        update = flat.exp_avg / self.divisor(flat)
        return update.mul_(self.step_size(flat, step) / lr) if lr else update

    def _apply(self, flat: Flat, update: Tensor, coefficients: Tensor) -> None:
        flat.coefficients = coefficients
        flat.values.addcmul_(update, flat.expand(coefficients), value=-float(flat.options["lr"]))


def _norms(flat: Flat, tensor: Tensor) -> Tensor:
    """The L2 norm of each parameter's part of a flat tensor."""
    return torch.stack(foreach_norm(flat.views(tensor)))
