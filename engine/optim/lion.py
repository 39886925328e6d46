"""Lion (Chen et al., arXiv 2302.06675), which torch does not have. Elementwise: it may step on any slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from engine.torch_compat import foreach_add_, foreach_lerp_, foreach_mul, foreach_mul_, foreach_sign_


class Lion(torch.optim.Optimizer):
    """p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p), then m = beta2 * m + (1 - beta2) * g.

    Defaults are DeepSpeed's; the paper advises betas (0.9, 0.99), and a learning rate 3 to 10 times smaller than
    AdamW's with a weight decay larger by the same factor.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if not float(lr) >= 0.0 or not weight_decay >= 0.0:
            raise ValueError(f"lr ({float(lr)}) and weight_decay ({weight_decay}) must not be negative")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def initialize_state(self, params: Iterable[torch.Tensor]) -> None:
        """Give each parameter the state it would have before its first step."""
        for parameter in params:
            self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            self.initialize_state(params)
            grads = [parameter.grad for parameter in params]
            momenta = [self.state[parameter]["exp_avg"] for parameter in params]
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            updates = foreach_mul(momenta, beta1)
            foreach_add_(updates, grads, alpha=1.0 - beta1)
            foreach_sign_(updates)
            if group["weight_decay"] != 0.0:
                foreach_mul_(params, 1.0 - lr * group["weight_decay"])
            foreach_add_(params, updates, alpha=-lr)
            foreach_lerp_(momenta, grads, 1.0 - beta2)
        return loss
