"""The 1-bit optimizers once more: all ranks in one process, float64, one formula a line. Knows of no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.unit.collectives.compressed_oracle import SlowAllReduce


@dataclass
class SlowOptimizer:
    """One flat tensor per rank. ``sizes``: of the parameters in it, in order (LAMB, and the unit ``tensor``)."""

    initial: Tensor
    sizes: list[int]
    num_ranks: int
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    wd: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.p = [self.initial.double().clone() for _ in range(self.num_ranks)]
        self.m = [torch.zeros_like(self.p[0]) for _ in range(self.num_ranks)]
        self.v = torch.zeros_like(self.p[0])
        self.t = self.num_updates = 0
        self.reduce = SlowAllReduce(
            self.num_ranks,
            self.initial.numel(),
            self.sizes if self.options.get("compression_unit") == "tensor" else None,
            self.options.get("mask"),
            self.options.get("compression_scale") == "l1",
        )
        self.divides = self.options.get("compression_of", "update") == "update"
        self.largest = self.options.get("max_update", 10.0) or float("inf")

    def divisor(self, variance: Tensor | None = None, num_updates: int | None = None) -> Tensor:
        v = self.v if variance is None else variance
        if self.options.get("bias_correction"):
            v = v / (1 - self.betas[1] ** (num_updates or self.num_updates))
        return (v + self.eps).sqrt() if self.options.get("eps_inside_sqrt") else v.sqrt() + self.eps

    def size(self) -> float:
        return self.lr / (1 - self.betas[0] ** self.t if self.options.get("bias_correction") else 1.0)

    def mean(self, xs: list[Tensor]) -> Tensor:
        """CAR, or the mean itself on one rank or where ``exact`` asks for it."""
        if self.num_ranks == 1:
            return xs[0]
        if self.options.get("exact"):
            return torch.stack(xs).mean(0)
        d = self.divisor() if self.divides else torch.ones_like(self.v)
        return self.reduce.call([x / d for x in xs]) * d

    def bounded(self, x: Tensor, factor: float = 1.0) -> Tensor:
        limit = self.largest * factor * self.divisor()
        return x.clamp(-limit, limit) if self.largest != float("inf") else x

    def update_variance(self, g: Tensor) -> None:
        self.num_updates += 1
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g * g

    def averaged(self, m: Tensor, g: Tensor) -> Tensor:
        return self.betas[0] * m + (1 - self.betas[0]) * g

    def step(self, gradients: list[Tensor]) -> None:
        self.t += 1
        self.advance([g.double() for g in gradients])


class SlowAdam(SlowOptimizer):
    def advance(self, gs: list[Tensor]) -> None:
        if self.t <= self.options["freeze_step"]:
            g = torch.stack(gs).mean(0)
            self.update_variance(g)
            m = self.averaged(self.m[0], g)
        else:
            m = self.mean([self.bounded(self.averaged(self.m[0], g)) for g in gs])
        self.m = [m] * self.num_ranks
        p = self.p[0] - self.lr * self.wd * self.p[0] - self.size() * m / self.divisor()
        self.p = [p] * self.num_ranks


class SlowZeroOneAdam(SlowOptimizer):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.iv = self.li = 1
        self.c = self.n = 0
        self.kinds: list[str] = []
        self.start: Tensor | None = None

    def advance(self, gs: list[Tensor]) -> None:
        if self.t <= self.options["var_freeze_step"]:
            self.phase_a(gs)
        else:
            self.phase_b(gs)

    def phase_a(self, gs: list[Tensor]) -> None:
        if self.t % self.iv == 0:
            g = torch.stack(gs).mean(0)
            before = self.divisor() if self.num_updates else None
            self.update_variance(g)
            if self.divides and before is not None:  # errors keep their size in units of the gradient
                ratio = torch.ones(self.reduce.padded, dtype=torch.float64)
                ratio[: g.numel()] = before / self.divisor()
                self.reduce.errors = [e * ratio for e in self.reduce.errors]
                chunks = ratio.chunk(self.num_ranks)
                self.reduce.server_errors = [e * r for e, r in zip(self.reduce.server_errors, chunks, strict=True)]
            self.c += 1
            if self.c == self.options["var_update_scaler"]:
                self.c, self.iv = 0, 2 * self.iv
            self.kinds.append("full")
        else:
            g = self.mean([self.bounded(g, 1 / (1 - self.betas[0])) for g in gs])
            self.kinds.append("bit")
        m = self.averaged(self.m[0], g)
        p = self.p[0] - self.lr * self.wd * self.p[0] - self.size() * m / self.divisor()
        self.m, self.p = [m] * self.num_ranks, [p] * self.num_ranks

    def phase_b(self, gs: list[Tensor]) -> None:
        if self.t == self.options["var_freeze_step"] + 1:
            self.reduce.errors = [torch.zeros_like(e) for e in self.reduce.errors]
            self.reduce.server_errors = [torch.zeros_like(e) for e in self.reduce.server_errors]
        if self.start is None:
            self.start, self.length = self.p[0].clone(), 0.0
            self.u = [torch.zeros_like(p) for p in self.p]
        keep = 1 - self.lr * self.wd
        self.start, self.length = keep * self.start, keep * self.length + self.size()
        self.m = [self.bounded(self.averaged(m, g)) for m, g in zip(self.m, gs, strict=True)]
        self.u = [keep * u - self.size() * m / self.divisor() for u, m in zip(self.u, self.m, strict=True)]
        self.p = [self.start + u for u in self.u]
        if self.t % self.li == 0:
            w = self.mean([u * self.divisor() for u in self.u])
            self.m = [-w / self.length] * self.num_ranks
            self.p = [self.start + w / self.divisor()] * self.num_ranks
            self.start = None
            self.kinds.append("bit")
        else:
            self.kinds.append("none")
        self.n += 1
        if self.n == self.options["local_step_scaler"]:
            self.n, self.li = 0, min(self.options["local_step_clipper"], 2 * self.li)


class SlowLamb(SlowOptimizer):
    """``factors`` and ``coefficients``: the r and the whole coefficient of each tensor, step by step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.sizes)
        self.average, self.last, self.k = [0.0] * count, [1.0] * count, [1.0] * count
        self.factors: list[list[float]] = []
        self.coefficients: list[list[float]] = []
        self.seen_gradients: list[Tensor] = []

    def cut(self, x: Tensor) -> list[Tensor]:
        return list(x.split(self.sizes))

    def advance(self, gs: list[Tensor]) -> None:
        if self.t <= self.options["freeze_step"]:
            self.warm_up(torch.stack(gs).mean(0))
        else:
            self.compressed(gs)

    def warm_up(self, g: Tensor) -> None:
        self.update_variance(g)
        m = self.averaged(self.m[0], g)
        beta = self.options.get("coeff_beta", 0.9)
        coefficients = []
        p = self.cut(self.p[0])
        u = self.cut(self.size() / self.lr * m / self.divisor() + self.wd * self.p[0])
        for i in range(len(p)):
            a, b = p[i].norm().item(), u[i].norm().item()
            low, high = self.options.get("min_coeff", 0.01), self.options.get("max_coeff", 10.0)
            c = min(max(a / b, low), high) if a > 0 and b > 0 else 1.0
            if c != 1.0:
                self.average[i] = beta * self.average[i] + (1 - beta) * c
            coefficients.append(c)
        self.p = [torch.cat([p[i] - self.lr * coefficients[i] * u[i] for i in range(len(p))])] * self.num_ranks
        self.m = [m] * self.num_ranks
        self.coefficients.append(coefficients)

    def compressed(self, gs: list[Tensor]) -> None:
        if self.t == self.options["freeze_step"] + 1:
            self.fresh = self.v.clone()
            travelling = self.cut(self.m[0] / self.divisor() if self.divides else self.m[0])
            roots = [part.square().mean().sqrt().item() for part in travelling]
            alive = [root for root in roots if root > 0]
            self.k = [sum(alive) / len(alive) / root if root > 0 else 1.0 for root in roots]
            self.average = [average or 1.0 for average in self.average]
        k = torch.repeat_interleave(torch.tensor(self.k).double(), torch.tensor(self.sizes))
        old = self.m[0]
        m = self.mean([k * self.bounded(self.averaged(old, g)) for g in gs]) / k
        g = (m - self.betas[0] * old) / (1 - self.betas[0])
        self.seen_gradients.append(g)
        self.fresh = self.betas[1] * self.fresh + (1 - self.betas[1]) * g * g
        a = self.cut(self.size() / self.lr * m / self.divisor())
        quotient = self.cut(self.divisor() / self.divisor(self.fresh, self.t))
        p, factors, coefficients = self.cut(self.p[0]), [], []
        threshold = self.options.get("factor_threshold", 0.1)
        for i in range(len(p)):
            u = a[i] + self.wd * p[i]
            r = quotient[i].max().item()
            if self.wd > 0:
                rho = min(1.0, (a[i].norm() / u.norm()).item()) if u.norm() > 0 else 1.0
                r = r * rho + 1 - rho
            r = min(max(r, self.options.get("factor_min", 0.5)), self.options.get("factor_max", 4.0))
            r = min(max(r, self.last[i] * (1 - threshold)), self.last[i] * (1 + threshold))
            self.last[i] = r
            factors.append(r)
            coefficients.append(self.average[i] * r)
            p[i] = p[i] - self.lr * coefficients[i] * u
        self.p, self.m = [torch.cat(p)] * self.num_ranks, [m] * self.num_ranks
        self.factors.append(factors)
        self.coefficients.append(coefficients)


SLOW = {"OneBitAdam": SlowAdam, "ZeroOneAdam": SlowZeroOneAdam, "OneBitLamb": SlowLamb}
