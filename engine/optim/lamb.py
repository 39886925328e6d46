"""Lamb (JSON ``optimizer.type`` ``Lamb``; You et al., arXiv 1904.00962): Adam with one trust ratio per parameter.

The update itself is elementwise; only the two norms of a parameter need all of it. So Lamb steps on slices too: with
``norm_reduce`` the squared norms of all parameters go through one reduction per step, 8 bytes a parameter. Every rank
calls it once per step with a vector of the same length, whatever slices it holds, because entries are placed by the
parameter's position in the whole model, not on the rank.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from engine import torch_compat
from engine.contracts import EngineError

NormReduce = Callable[[torch.Tensor], torch.Tensor]

ONE_DIMENSIONAL = "ndim<=1"
"""The entry of ``exclude_from_adaptation`` that stands for all biases and normalisation weights."""

_DEEPSPEED_RATIO_BOUNDS = (0.01, 10.0)


class _Work(NamedTuple):
    """What one group's parameters need between the two passes of a step; all lists run over ``params``."""

    params: list[torch.Tensor]
    updates: list[torch.Tensor]
    step_sizes: list[float]
    positions: list[int]
    adapted: list[bool]


class Lamb(torch.optim.Optimizer):
    """p -= lr * ratio * u, u = mh / (sqrt(vh) + eps) + weight_decay * p, ratio = ||p|| / ||u|| (1 if either norm is 0).

    The default is the paper's: m and v are bias-corrected before the ratio is formed, and ratios have no bounds unless
    ``min_coeff``/``max_coeff`` give them. ``compat="deepspeed"`` is DeepSpeed's FusedLamb: u from the uncorrected
    moments, the correction as a factor on the step (weight decay included), ratios within [0.01, 10]. The two differ
    most in the first 1 / (1 - beta2) steps.

    ``eps_inside_sqrt`` puts eps under the root. ``exclude_from_adaptation`` lists parameter names (shell patterns such
    as ``*.bias``) and/or ``"ndim<=1"``: their ratio is 1.

    A group may carry ``param_names`` (for the patterns) and, needed with ``norm_reduce``: ``global_index`` (position of
    each parameter in the model), ``num_global`` (how many the model has), ``global_ndim`` (for ``"ndim<=1"``).
    ``norm_reduce`` gets float32 of shape [2 * num_global], partial squared norms of p then of u, and returns their
    sums over the ranks that hold the other slices. The vector is on the parameters' device, or on the CPU where a rank
    holds no parameter at all: a reduction that needs another device moves it.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float | None = None,
        min_coeff: float | None = None,
        exclude_from_adaptation: Sequence[str] = (),
        compat: str | None = None,
        amsgrad: bool = False,
        norm_reduce: NormReduce | None = None,
    ) -> None:
        if compat not in (None, "deepspeed"):
            raise ValueError(f'compat must be "deepspeed" or absent, not {compat!r}')
        if amsgrad:
            raise ValueError("Lamb has no amsgrad variant")
        if isinstance(exclude_from_adaptation, str):
            raise ValueError("exclude_from_adaptation must be a list of names")
        if not all(value >= 0.0 for value in (float(lr), eps, weight_decay)):
            raise ValueError(f"lr ({float(lr)}), eps ({eps}) and weight_decay ({weight_decay}) must not be negative")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), not {betas}")
        low, high = _DEEPSPEED_RATIO_BOUNDS if compat == "deepspeed" else (0.0, math.inf)
        self._minimum_ratio = low if min_coeff is None else float(min_coeff)
        self._maximum_ratio = high if max_coeff is None else float(max_coeff)
        if not 0.0 <= self._minimum_ratio <= self._maximum_ratio:
            raise ValueError(f"min_coeff ({self._minimum_ratio}) must lie in [0, max_coeff = {self._maximum_ratio}]")
        self._deepspeed = compat == "deepspeed"
        self._bias_correction = bias_correction
        self._eps_inside_sqrt = eps_inside_sqrt
        self._excluded = tuple(exclude_from_adaptation)
        self._coefficients: dict[torch.Tensor, float] = {}
        self.norm_reduce = norm_reduce
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, in the order of this rank's parameters; 1.0 for one not stepped."""
        return [self._coefficients.get(parameter, 1.0) for group in self.param_groups for parameter in group["params"]]

    def initialize_state(self, params: Iterable[torch.Tensor]) -> None:
        """Give each parameter the state it would have before its first step."""
        for parameter in params:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: list[_Work] = []
        first_position = 0
        for group in self.param_groups:
            work.append(self._prepare(group, first_position))
            first_position += len(group["params"])
        ratios = self._trust_ratios(work)
        self._coefficients.clear()
        for item in work:
            own = [ratios[i] if adapted else 1.0 for i, adapted in zip(item.positions, item.adapted, strict=True)]
            self._coefficients.update(zip(item.params, own, strict=True))
            if item.params:
                factors = [-size * ratio for size, ratio in zip(item.step_sizes, own, strict=True)]
                torch_compat.foreach_mul_(item.updates, factors)
                torch_compat.foreach_add_(item.params, item.updates)
        return loss

    def _prepare(self, group: dict[str, Any], first_position: int) -> _Work:
        """Advance the moments of one group and form its updates u, before the trust ratio."""
        held = [i for i, parameter in enumerate(group["params"]) if parameter.grad is not None]
        params = [group["params"][i] for i in held]
        positions = (
            [first_position + i for i in held] if self.norm_reduce is None else self._global_positions(group, held)
        )
        adapted = [not self._is_excluded(group, i) for i in held]
        if not params:
            return _Work([], [], [], positions, adapted)
        self.initialize_state(params)
        grads = [parameter.grad for parameter in params]
        first_moments = [self.state[parameter]["exp_avg"] for parameter in params]
        second_moments = [self.state[parameter]["exp_avg_sq"] for parameter in params]
        (beta1, beta2), lr, eps = group["betas"], float(group["lr"]), group["eps"]
        torch_compat.foreach_lerp_(first_moments, grads, 1.0 - beta1)
        torch_compat.foreach_mul_(second_moments, beta2)
        torch_compat.foreach_addcmul_(second_moments, grads, grads, 1.0 - beta2)

        corrections1, corrections2 = [], []
        for parameter in params:
            step = self.state[parameter]["step"].add_(1.0).item()
            corrections1.append(1.0 - beta1**step if self._bias_correction else 1.0)
            corrections2.append(1.0 - beta2**step if self._bias_correction else 1.0)
        if self._deepspeed:
            step_sizes = [lr * math.sqrt(c2) / c1 for c1, c2 in zip(corrections1, corrections2, strict=True)]
            corrections1 = corrections2 = [1.0] * len(params)
        else:
            step_sizes = [lr] * len(params)

        updates = torch_compat.foreach_div(first_moments, corrections1)
        denominators = torch_compat.foreach_div(second_moments, corrections2)
        if self._eps_inside_sqrt:
            torch_compat.foreach_add_(denominators, eps)
        torch_compat.foreach_sqrt_(denominators)
        if not self._eps_inside_sqrt:
            torch_compat.foreach_add_(denominators, eps)
        torch_compat.foreach_div_(updates, denominators)
        if group["weight_decay"] != 0.0:
            torch_compat.foreach_add_(updates, params, alpha=group["weight_decay"])
        return _Work(params, list(updates), step_sizes, positions, adapted)

    def _trust_ratios(self, work: Sequence[_Work]) -> list[float]:
        """One ratio per position. Reads the device once; reduces over ranks once, also on a rank that holds nothing."""
        if self.norm_reduce is None:
            num_positions = sum(len(group["params"]) for group in self.param_groups)
        else:
            num_positions = self.param_groups[0]["num_global"]
        params = [parameter for item in work for parameter in item.params]
        updates = [update for item in work for update in item.updates]
        device = self._device()
        squares = torch.zeros(2, num_positions, dtype=torch.float32, device=device)
        if params:
            positions = torch.tensor([i for item in work for i in item.positions], device=device)
            for row, tensors in enumerate((params, updates)):
                norms = torch.stack([norm.to(torch.float32) for norm in torch_compat.foreach_norm(tensors)])
                # Added, not assigned: a rank may hold several slices of one parameter.
                squares[row].index_add_(0, positions, norms.square())
        if self.norm_reduce is not None:
            squares = self.norm_reduce(squares.view(-1)).view(2, num_positions)
        weight_norms, update_norms = squares.sqrt().unbind()
        ratios = (weight_norms / update_norms).clamp(self._minimum_ratio, self._maximum_ratio)
        defined = (weight_norms > 0.0) & (update_norms > 0.0)
        coefficients: list[float] = torch.where(defined, ratios, torch.ones_like(ratios)).tolist()
        return coefficients

    def _device(self) -> torch.device | None:
        return next((parameter.device for group in self.param_groups for parameter in group["params"]), None)

    def _global_positions(self, group: dict[str, Any], held: list[int]) -> list[int]:
        if "global_index" not in group or "num_global" not in group:
            raise EngineError(
                "Lamb on slices of parameters needs global_index and num_global in every parameter group, so that all "
                "ranks place a parameter's norms alike."
            )
        return [group["global_index"][i] for i in held]

    def _is_excluded(self, group: dict[str, Any], index: int) -> bool:
        if not self._excluded:
            return False
        if ONE_DIMENSIONAL in self._excluded:
            if "global_ndim" in group:
                num_dimensions = group["global_ndim"][index]
            elif self.norm_reduce is None:
                num_dimensions = group["params"][index].ndim
            else:
                raise EngineError(
                    f'Lamb with "{ONE_DIMENSIONAL}" on slices needs global_ndim in every parameter group.'
                )
            if num_dimensions <= 1:
                return True
        patterns = [pattern for pattern in self._excluded if pattern != ONE_DIMENSIONAL]
        if patterns and "param_names" not in group:
            raise EngineError(
                f"Lamb's exclude_from_adaptation names {', '.join(patterns)}, but its parameters have no names; "
                "give it model.named_parameters()."
            )
        return any(fnmatch.fnmatchcase(group["param_names"][index], pattern) for pattern in patterns)
