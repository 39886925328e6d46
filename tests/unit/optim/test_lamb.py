from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.contracts import EngineError
from engine.optim.factory import build_inner_optimizers
from engine.optim.lamb import Lamb, NormReduce
from engine.optim.lion import Lion
from engine.plan.plan import OptimizerPlan

SHAPES = [(6, 5), (6,), (3, 2, 2), (1,)]


def parameters(scale: float = 1.0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator) * scale) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    return [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES]


def oracle(
    params: list[torch.nn.Parameter],
    num_steps: int,
    *,
    lr: float,
    wd: float = 0.0,
    eps: float = 1e-8,
    deepspeed: bool = False,
    inside: bool = False,
    correct: bool = True,
    bounds: tuple[float, float] | None = None,
) -> tuple[list[torch.Tensor], list[float]]:
    """LAMB written down once more, one float64 tensor at a time."""
    low, high = bounds or ((0.01, 10.0) if deepspeed else (0.0, math.inf))
    b1, b2 = 0.9, 0.999
    result, ratios = [], []
    for index, start in enumerate(params):
        p = start.detach().double().clone()
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for t in range(1, num_steps + 1):
            g = gradients(t - 1)[index].double()
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            c1, c2 = (1 - b1**t, 1 - b2**t) if correct else (1.0, 1.0)
            mh, vh = (m, v) if deepspeed else (m / c1, v / c2)
            u = mh / ((vh + eps).sqrt() if inside else vh.sqrt() + eps) + wd * p
            w_norm, u_norm = p.norm(), u.norm()
            ratio = float((w_norm / u_norm).clamp(low, high)) if w_norm > 0 and u_norm > 0 else 1.0
            p = p - (lr * math.sqrt(c2) / c1 if deepspeed else lr) * ratio * u
        result.append(p)
        ratios.append(ratio)
    return result, ratios


CASES = [
    ({"lr": 0.01}, {"lr": 0.01}),
    ({"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "wd": 0.1}),
    ({"lr": 0.01, "weight_decay": 0.1, "compat": "deepspeed"}, {"lr": 0.01, "wd": 0.1, "deepspeed": True}),
    ({"lr": 0.01, "eps": 1e-3, "eps_inside_sqrt": True}, {"lr": 0.01, "eps": 1e-3, "inside": True}),
    (
        {"lr": 0.01, "eps": 1e-3, "eps_inside_sqrt": True, "compat": "deepspeed"},
        {"lr": 0.01, "eps": 1e-3, "inside": True, "deepspeed": True},
    ),
    ({"lr": 0.01, "bias_correction": False}, {"lr": 0.01, "correct": False}),
    ({"lr": 0.01, "bias_correction": False, "compat": "deepspeed"}, {"lr": 0.01, "correct": False, "deepspeed": True}),
    ({"lr": 0.01, "min_coeff": 0.9, "max_coeff": 1.1}, {"lr": 0.01, "bounds": (0.9, 1.1)}),
    (
        {"lr": 0.01, "min_coeff": 0.2, "max_coeff": 0.5, "compat": "deepspeed"},
        {"lr": 0.01, "bounds": (0.2, 0.5), "deepspeed": True},
    ),
]


@pytest.mark.parametrize(("options", "expected"), CASES)
def test_lamb_equals_the_formula(options: dict[str, Any], expected: dict[str, Any]) -> None:
    params = parameters()
    optimizer = Lamb(params, **options)
    for step in range(12):
        for parameter, gradient in zip(params, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    values, ratios = oracle(parameters(), 12, **expected)
    for parameter, value in zip(params, values, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)
    assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-4)


def test_the_two_modes_differ_in_the_first_step_as_the_corrections_say() -> None:
    """Without bias correction m / sqrt(v) of step 1 is (1 - b1) / sqrt(1 - b2) times too long, and the ratio short."""
    ratios = []
    for compat in (None, "deepspeed"):
        params = parameters()
        optimizer = Lamb(params, compat=compat)
        for parameter, gradient in zip(params, gradients(0), strict=True):
            parameter.grad = gradient
        optimizer.step()
        ratios.append(optimizer.get_lamb_coeffs()[0])
    assert ratios[0] / ratios[1] == pytest.approx((1 - 0.9) / math.sqrt(1 - 0.999), rel=1e-4)


def test_the_update_scales_with_the_parameter() -> None:
    moved = []
    for scale in (1.0, 4.0):
        params, start = parameters(scale), parameters(scale)
        optimizer = Lamb(params, lr=0.125)
        for parameter, gradient in zip(params, gradients(0), strict=True):
            parameter.grad = gradient
        optimizer.step()
        moved.append([(p - s).detach() for p, s in zip(params, start, strict=True)])
        for p, s in zip(params, start, strict=True):
            assert ((p - s).norm() / s.norm()).item() == pytest.approx(0.125, rel=1e-5)
    for small, large in zip(*moved, strict=True):
        torch.testing.assert_close(small * 4.0, large, rtol=1e-5, atol=1e-7)


def test_zero_norms_give_ratio_one() -> None:
    zero, still = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([zero, still], lr=0.1)
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1))
    assert torch.equal(still, torch.ones(3))


def test_exclusion_by_pattern_and_by_dimensions() -> None:
    names = ["a.weight", "a.bias", "norm.weight", "scalar"]
    for excluded, adapted in (
        (["*.bias", "norm.*"], [True, False, False, True]),
        (["ndim<=1"], [True, False, True, False]),
        (["ndim<=1", "a.*"], [False, False, True, False]),
    ):
        params = parameters(scale=3.0)
        named = [{"params": params, "param_names": names}]
        optimizer = Lamb(named, exclude_from_adaptation=excluded)
        for parameter, gradient in zip(params, gradients(0), strict=True):
            parameter.grad = gradient
        optimizer.step()
        assert [coefficient != 1.0 for coefficient in optimizer.get_lamb_coeffs()] == adapted
    params = parameters()
    params[0].grad = gradients(0)[0]
    with pytest.raises(EngineError, match="named_parameters"):
        Lamb(params, exclude_from_adaptation=["*.bias"]).step()


class ThreadedRanks:
    """Ranks as threads of one process; the reduction is a sum over what all of them brought."""

    def __init__(self, num_ranks: int) -> None:
        self._brought: list[torch.Tensor] = [torch.empty(0)] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=10)
        self.num_calls = [0] * num_ranks

    def reduce_for(self, rank: int) -> NormReduce:
        def reduce(vector: torch.Tensor) -> torch.Tensor:
            self.num_calls[rank] += 1
            self._brought[rank] = vector
            self._barrier.wait()
            total = torch.stack(self._brought).sum(0)
            self._barrier.wait()
            return total

        return reduce


Piece = tuple[str, int, slice]
PIECES: list[list[Piece]] = [
    [("p0", 0, slice(None)), ("p1", 1, slice(0, 2))],
    [("p1", 1, slice(2, None)), ("p2", 2, slice(0, 5)), ("p2.rest", 2, slice(5, None)), ("p3", 3, slice(None))],
    [],
]
"""What each of three ranks holds of the flattened parameters: slices, one parameter in two of them, or nothing."""


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"weight_decay": 0.1, "compat": "deepspeed"}, {"exclude_from_adaptation": ["ndim<=1"]}],
)
def test_lamb_on_slices_equals_lamb_on_whole_parameters(options: dict[str, Any]) -> None:
    plan = OptimizerPlan("Lamb", {"lr": 0.01, **options})
    dense = parameters()
    reference = Lamb(dense, **plan.params)
    for step in range(4):
        for parameter, gradient in zip(dense, gradients(step), strict=True):
            parameter.grad = gradient
        reference.step()
    expected = reference.get_lamb_coeffs()
    ranks = ThreadedRanks(len(PIECES))

    def train(rank: int) -> tuple[list[torch.nn.Parameter], list[float]]:
        held = PIECES[rank]
        params = [torch.nn.Parameter(parameters()[index].detach().flatten()[cut].clone()) for _, index, cut in held]
        group = {
            "params": params,
            "names": [name for name, _, _ in held],
            "global_index": [index for _, index, _ in held],
            "num_global": len(SHAPES),
            "global_ndim": [len(SHAPES[index]) for _, index, _ in held],
        }
        (optimizer,) = build_inner_optimizers(plan, [group], norm_reduce=ranks.reduce_for(rank))
        assert isinstance(optimizer, Lamb)
        for step in range(4):
            for parameter, (_, index, cut) in zip(params, held, strict=True):
                parameter.grad = gradients(step)[index].flatten()[cut].clone()
            optimizer.step()
        return params, optimizer.get_lamb_coeffs()

    with ThreadPoolExecutor(len(PIECES)) as pool:
        results = list(pool.map(train, range(len(PIECES))))
    assert ranks.num_calls == [4, 4, 4]
    for held, (params, coefficients) in zip(PIECES, results, strict=True):
        assert coefficients == pytest.approx([expected[index] for _, index, _ in held], rel=1e-5)
        for parameter, (_, index, cut) in zip(params, held, strict=True):
            whole = dense[index].detach().flatten()
            torch.testing.assert_close(parameter.detach(), whole[cut], rtol=1e-5, atol=1e-6)


def test_slices_without_global_positions_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(EngineError, match="global_index"):
        Lamb([parameter], norm_reduce=lambda vector: vector).step()


def test_lion_equals_the_formula() -> None:
    params = parameters()
    optimizer = Lion(params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    expected = [p.detach().double().clone() for p in parameters()]
    momenta = [torch.zeros_like(p) for p in expected]
    for step in range(10):
        for index, gradient in enumerate(gradients(step)):
            params[index].grad = gradient
            g = gradient.double()
            direction = torch.sign(0.9 * momenta[index] + 0.1 * g)
            expected[index] = expected[index] - 0.01 * (direction + 0.1 * expected[index])
            momenta[index] = 0.99 * momenta[index] + 0.01 * g
        optimizer.step()
    for parameter, value in zip(params, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)
