from __future__ import annotations

import math

import pytest
import torch
from engine.contracts import EngineError
from engine.optim.factory import build_inner_optimizers
from engine.optim.lamb import Lamb
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
    params, num_steps, *, deepspeed=False, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, wd=0.0, inside=False, bounds=None,
    correct=True,
):  # fmt: skip
    """LAMB written down once more, one float64 tensor at a time."""
    low, high = bounds or ((0.01, 10.0) if deepspeed else (0.0, math.inf))
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
def test_lamb_equals_the_formula(options, expected):
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


def test_the_two_modes_differ_in_the_first_step_as_the_corrections_say():
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


def test_the_update_scales_with_the_parameter():
    moved = []
    for scale in (1.0, 4.0):
        params, start = parameters(scale), parameters(scale)
        optimizer = Lamb(params, lr=0.125)
        for parameter, gradient in zip(params, gradients(0), strict=True):
            parameter.grad = gradient
        optimizer.step()
        moved.append([(p - s).detach() for p, s in zip(params, start, strict=True)])
        for p, s in zip(params, start, strict=True):
            assert float((p - s).norm() / s.norm()) == pytest.approx(0.125, rel=1e-5)
    for small, large in zip(*moved, strict=True):
        torch.testing.assert_close(small * 4.0, large, rtol=1e-5, atol=1e-7)


def test_zero_norms_give_ratio_one():
    zero, still = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([zero, still], lr=0.1)
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1))
    assert torch.equal(still, torch.ones(3))


def test_exclusion_by_pattern_and_by_dimensions():
    names = ["a.weight", "a.bias", "norm.weight", "scalar"]
    for excluded, adapted in (
        (["*.bias", "norm.*"], [True, False, False, True]),
        (["ndim<=1"], [True, False, True, False]),
        (["ndim<=1", "a.*"], [False, False, True, False]),
    ):
        params = parameters(scale=3.0)
        optimizer = Lamb(list(zip(names, params, strict=True)), exclude_from_adaptation=excluded)
        for parameter, gradient in zip(params, gradients(0), strict=True):
            parameter.grad = gradient
        optimizer.step()
        assert [coefficient != 1.0 for coefficient in optimizer.get_lamb_coeffs()] == adapted
    params = parameters()
    params[0].grad = gradients(0)[0]
    with pytest.raises(EngineError, match="named_parameters"):
        Lamb(params, exclude_from_adaptation=["*.bias"]).step()


class SimulatedRanks:
    """Ranks stepped one after the other: a first pass collects every rank's vector, a second one uses their sum."""

    def __init__(self, num_ranks: int) -> None:
        self.vectors: list[torch.Tensor | None] = [None] * num_ranks
        self.total: torch.Tensor | None = None
        self.num_calls = [0] * num_ranks

    def reduce_for(self, rank: int):
        def reduce(vector: torch.Tensor) -> torch.Tensor:
            self.num_calls[rank] += 1
            self.vectors[rank] = vector.clone()
            return vector if self.total is None else self.total.clone()

        return reduce


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "compat": "deepspeed"}, {"exclude_from_adaptation": ["ndim<=1"]}])
def test_lamb_on_slices_equals_lamb_on_whole_parameters(options):
    """Rank 0 holds all of p0 and part of p1; rank 1 the rest, p2 in two pieces; rank 2 nothing at all."""
    dense = parameters()
    reference = Lamb(dense, lr=0.01, **options)
    flat = [parameter.detach().flatten() for parameter in parameters()]
    pieces = [
        [("p0", 0, flat[0]), ("p1", 1, flat[1][:2])],
        [("p1", 1, flat[1][2:]), ("p2", 2, flat[2][:5]), ("p2b", 2, flat[2][5:]), ("p3", 3, flat[3])],
        [],
    ]
    ranks = SimulatedRanks(len(pieces))
    optimizers, locals_ = [], []
    for rank, held in enumerate(pieces):
        params = [torch.nn.Parameter(values.clone()) for _, _, values in held]
        group = {
            "params": params,
            "names": [name for name, _, _ in held],
            "global_index": [index for _, index, _ in held],
            "num_global": len(SHAPES),
            "global_ndim": [len(SHAPES[index]) for _, index, _ in held],
        }
        plan = OptimizerPlan("Lamb", {"lr": 0.01, **options})
        (optimizer,) = build_inner_optimizers(plan, [group], norm_reduce=ranks.reduce_for(rank))
        optimizers.append(optimizer)
        locals_.append(params)
    for step in range(4):
        for parameter, gradient in zip(dense, gradients(step), strict=True):
            parameter.grad = gradient
        reference.step()
        cut = [gradient.flatten() for gradient in gradients(step)]
        local_gradients = [[cut[0], cut[1][:2]], [cut[1][2:], cut[2][:5], cut[2][5:], cut[3]], []]
        for params, given in zip(locals_, local_gradients, strict=True):
            for parameter, gradient in zip(params, given, strict=True):
                parameter.grad = gradient.clone()
        before = [[p.detach().clone() for p in params] for params in locals_]
        states = [{p: {k: v.clone() for k, v in o.state[p].items()} for p in o.state} for o in optimizers]
        ranks.total = None
        for optimizer in optimizers:
            optimizer.step()
        ranks.total = sum(ranks.vectors)
        assert ranks.total.shape == (2 * len(SHAPES),)
        for optimizer, params, saved, state in zip(optimizers, locals_, before, states, strict=True):
            with torch.no_grad():
                for parameter, value in zip(params, saved, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
            optimizer.state.update(state)
            optimizer.step()
    assert ranks.num_calls == [8, 8, 8]
    joined = [torch.cat([p.detach() for p in group]) for group in (
        [locals_[0][0]], [locals_[0][1], locals_[1][0]], [locals_[1][1], locals_[1][2]], [locals_[1][3]]
    )]  # fmt: skip
    for whole, parts in zip(dense, joined, strict=True):
        torch.testing.assert_close(parts, whole.detach().flatten(), rtol=1e-5, atol=1e-6)
    expected = reference.get_lamb_coeffs()
    assert optimizers[1].get_lamb_coeffs() == pytest.approx([expected[1], expected[2], expected[2], expected[3]], rel=1e-5)


def test_slices_without_global_positions_are_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(EngineError, match="global_index"):
        Lamb([parameter], norm_reduce=lambda vector: vector).step()


def test_lion_equals_the_formula():
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
