"""What the formulas of 1-bit LAMB and 0/1 Adam promise, seen on the engine's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.one_bit_runs import KINDS, SlowRun, config_of, distance, start, state_of, train
from tests.parity.small import Layers, regression_batch, seeded
from tests.parity.toy import part


def factors_of(scale_after: float, beta2: float, steps: int) -> list[list[float]]:
    """``last_factor`` of every parameter after each compressed step, the loss scaled by ``scale_after`` in them."""
    params = {"freeze_step": 4, "betas": [0.9, beta2]}
    model_engine = start(config_of("OneBitLamb", params))
    history = []
    for step in range(4 + steps):
        loss = model_engine(**regression_batch(0))
        model_engine.backward(loss * (1.0 if step < 4 else scale_after))
        model_engine.step()
        history.append([state["last_factor"].item() for state in state_of(model_engine).values()])
    model_engine.destroy()
    return history[4:]


def test_factors_are_bounded_and_change_by_a_tenth():
    falling = factors_of(1000.0, 0.99, 8)
    rising = factors_of(0.0, 0.1, 17)
    for parameter in range(len(falling[0])):
        fell = [step[parameter] for step in falling]
        assert fell == pytest.approx([max(0.9**n, 0.5) for n in range(1, 9)], rel=1e-5)
        assert fell[6] == 0.5 < fell[5]
        rose = [step[parameter] for step in rising]
        assert rose == pytest.approx([min(1.1**n, 4.0) for n in range(1, 18)], rel=1e-5)
        assert rose[14] == 4.0 > rose[13]


def test_lamb_averages_gradients_scales_momenta_alike_and_freezes_coefficients(ranks):
    params = {"freeze_step": 6, "coeff_beta": 0.5, "compression_of": "momentum", "max_update": 0.0}
    answers = ranks(2).run(train, config_of("OneBitLamb", params), 7, exact=True)
    slow = SlowRun("OneBitLamb", 2, {**params, "exact": True})
    expected = slow.run(7, lambda t: t > 6)
    assert distance(answers[0]["values"][-1], expected[-1][0]) < 2e-5
    # what the momentum says of the gradient is the mean gradient
    again = SlowRun("OneBitLamb", 2, {**params, "exact": True})
    again.run(6, lambda t: False)
    mean = torch.stack(again.gradients(6, True)).mean(0)
    torch.testing.assert_close(slow.optimizer.seen_gradients[0], mean, rtol=1e-8, atol=1e-10)  # type: ignore[attr-defined]
    fresh = {name: state["exp_avg_sq_fresh"] for name, state in answers[0]["state"].items()}
    frozen = {name: state["exp_avg_sq"] for name, state in answers[0]["state"].items()}
    offset = 0
    for name in slow.names:
        square = mean[offset : offset + fresh[name].numel()].square().view(fresh[name].shape)
        offset += fresh[name].numel()
        torch.testing.assert_close(
            fresh[name].double(), 0.99 * frozen[name].double() + 0.01 * square, rtol=1e-4, atol=1e-9
        )
    # k_l RMS(m_l) is the same for all tensors
    at_switch = answers[0]["moments"][5]
    sizes = [
        (state["momentum_scale"] * at_switch[name].square().mean().sqrt()).item()
        for name, state in answers[0]["state"].items()
    ]
    assert sizes == pytest.approx([sizes[0]] * len(sizes), rel=1e-5)
    # the coefficient is the frozen average times the factor
    coefficients = [(s["coeff_average"] * s["last_factor"]).item() for s in answers[0]["state"].values()]
    assert answers[0]["coefficients"] == pytest.approx(coefficients, rel=1e-6)


def test_zero_one_momentum_is_the_mean_over_ranks_and_steps(ranks):
    params = KINDS["ZeroOneAdam"]
    answers = ranks(3).run(train, config_of("ZeroOneAdam", params), 14, exact=True)
    slow = SlowRun("ZeroOneAdam", 3, {**params, "exact": True})
    expected = slow.run(14, lambda t: True)
    for rank, answer in enumerate(answers):
        assert distance(answer["values"][-1], expected[-1][rank]) < 2e-5
    # steps 9 and 10 are one interval: local momenta from the common one of step 8, then their mean with equal weights
    moments = [answer["moments"] for answer in answers]
    local = [slow_local_moments(rank, answers) for rank in range(3)]
    for name, common in moments[0][9].items():
        mean = sum((moments[rank][8][name].double() + local[rank][name]) / 2 for rank in range(3)) / 3
        torch.testing.assert_close(common.double(), mean, rtol=1e-3, atol=1e-6)


def slow_local_moments(rank: int, answers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rank ``rank``'s momentum in step 10 before the synchronisation, from its values and momentum after step 9."""
    model = seeded(Layers).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(answers[rank]["values"][8][name])
    batch = {key: value.double() for key, value in part(regression_batch(9), rank, 3).items()}
    model(**batch).backward()
    before = answers[rank]["moments"][8]
    return {name: 0.9 * before[name].double() + 0.1 * p.grad for name, p in model.named_parameters()}  # type: ignore[operator]
