"""OneBitAdam, ZeroOneAdam and OneBitLamb against slow optimizers that hold all ranks in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from engine.plan.one_bit import RoundSchedule, rounds
from engine.plan.plan import OptimizerPlan
from tests.parity.one_bit_runs import SlowRun, config_of, distance, train_each
from tests.parity.tiers import slow

ADAM = {"freeze_step": 6}
ZERO_ONE = {"var_freeze_step": 9, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
LAMB = {"freeze_step": 6, "coeff_beta": 0.5, "max_coeff": 2.0}
STEPS = 24

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adam": ("OneBitAdam", ADAM, {}),
    "adam of the momentum": ("OneBitAdam", {**ADAM, "compression_of": "momentum", "max_update": 0.0}, {}),
    "adam by tensor": ("OneBitAdam", {**ADAM, "compression_unit": "tensor"}, {}),
    "adam l1, decay": ("OneBitAdam", {**ADAM, "compression_scale": "l1", "weight_decay": 0.1}, {}),
    "adam corrected": ("OneBitAdam", {**ADAM, "bias_correction": True, "eps_inside_sqrt": True}, {}),
    "adam clipped": ("OneBitAdam", ADAM, {"gradient_clipping": 0.5}),
    "adam accumulating": ("OneBitAdam", ADAM, {"gradient_accumulation_steps": 2}),
    "adam bounded": ("OneBitAdam", {**ADAM, "max_update": 1.5}, {}),
    "zero-one": ("ZeroOneAdam", ZERO_ONE, {}),
    "zero-one of the momentum": ("ZeroOneAdam", {**ZERO_ONE, "compression_of": "momentum", "max_update": 0.0}, {}),
    "zero-one, decay, corrected": ("ZeroOneAdam", {**ZERO_ONE, "weight_decay": 0.1, "bias_correction": True}, {}),
    "zero-one by tensor, clipped": (
        "ZeroOneAdam",
        {**ZERO_ONE, "compression_unit": "tensor"},
        {"gradient_clipping": 0.5},
    ),
    "lamb": ("OneBitLamb", LAMB, {}),
    "lamb of the momentum": ("OneBitLamb", {**LAMB, "compression_of": "momentum", "max_update": 0.0}, {}),
    "lamb, decay, corrected": ("OneBitLamb", {**LAMB, "weight_decay": 0.1, "bias_correction": True}, {}),
    "lamb, tight factors": (
        "OneBitLamb",
        {**LAMB, "factor_max": 1.05, "factor_min": 0.95, "factor_threshold": 0.01},
        {},
    ),
}


def local_steps(kind: str, params: dict[str, Any]) -> Any:
    """Which steps' gradients stay local, said once more."""
    if kind != "ZeroOneAdam":
        return lambda t: t > params["freeze_step"]
    schedule = RoundSchedule(*(params[key] for key in ZERO_ONE))
    full = []
    for t in range(1, STEPS + 1):
        if schedule.refreshes(t):
            full.append(t)
        schedule.advance(t)
    return lambda t: t not in full


def cases_of(world: int) -> list[str]:
    return [case for case in CASES if 12 % (world * CASES[case][2].get("gradient_accumulation_steps", 1)) == 0]


@pytest.fixture(scope="module")
def run_of(ranks):
    """``run_of(world, case)``: what every rank tells. All cases of a world are run at once."""

    @functools.cache
    def runs(world: int) -> dict[str, list[dict[str, Any]]]:
        configs = {case: config_of(CASES[case][0], CASES[case][1], **CASES[case][2]) for case in cases_of(world)}
        answers = ranks(world).run(train_each, configs, STEPS, timeout=300)
        return {case: [answer[case] for answer in answers] for case in configs}

    return lambda world, case: runs(world)[case]


@pytest.mark.parametrize(
    ("world", "case"),
    [(slow if world >= 3 else pytest.param)(world, case) for world in (1, 2, 3, 4) for case in cases_of(world)],
)
def test_equal_to_the_slow_optimizer(run_of, world, case):
    kind, params, more = CASES[case]
    answers = run_of(world, case)
    accumulation = more.get("gradient_accumulation_steps", 1)
    slow = SlowRun(kind, world, params, more.get("gradient_clipping", 0.0), accumulation)
    expected = slow.run(STEPS, local_steps(kind, params))
    for step in range(STEPS):
        for rank, answer in enumerate(answers):
            apart = distance(answer["values"][step], expected[step][rank])
            assert apart < 2e-4, f"step {step + 1}, rank {rank}: {apart}"
            assert answer["norms"][step] == pytest.approx(slow.norms[step], rel=1e-3)
            assert answer["norms"][step] == answers[0]["norms"][step]


@pytest.mark.parametrize("world", [2, slow(3), slow(4)])
@pytest.mark.parametrize("case", ["adam", "lamb"])
def test_ranks_hold_the_same_bits(run_of, world, case):
    for step in range(STEPS):
        for answer in run_of(world, case):
            for what in ("values", "moments"):
                for name, value in run_of(world, case)[0][what][step].items():
                    assert torch.equal(answer[what][step][name], value), f"{what} of {name}, step {step + 1}"


@pytest.mark.parametrize("world", [2, slow(3), slow(4)])
def test_zero_one_ranks_are_together_after_synchronisations_and_apart_between(run_of, world):
    answers = run_of(world, "zero-one, decay, corrected")
    schedule = RoundSchedule(*(ZERO_ONE[key] for key in ZERO_ONE))
    num_apart = 0
    for step in range(STEPS):
        together = not schedule.is_local(step + 1) or schedule.synchronises(step + 1)
        schedule.advance(step + 1)
        num_apart += not together
        for answer in answers[1:]:
            for name, value in answers[0]["values"][step].items():
                assert torch.equal(answer["values"][step][name], value) == together, f"{name}, step {step + 1}"
    assert num_apart > 5


@pytest.mark.parametrize("world", [2, slow(3), slow(4)])
@pytest.mark.parametrize("case", ["adam", "zero-one"])
def test_bytes_of_every_step(run_of, world, case):
    """Full rounds send 2 (N-1)/N D numbers of 4 bytes, 1-bit rounds 2 (N-1)/N D'/8 bytes and 8 (N-1) of scales."""
    kind, params, _ = CASES[case]
    numel = sum(value.numel() for value in run_of(world, case)[0]["values"][0].values())
    padded = -(-numel // (8 * world)) * 8 * world
    sizes = {
        "full": 2 * (world - 1) * numel * 4 // world,
        "bit": 2 * (world - 1) * padded // 8 // world + 8 * (world - 1),
        "none": 0,
    }
    if kind == "ZeroOneAdam":
        slow = SlowRun(kind, world, params)
        slow.run(STEPS, lambda t: True)
        kinds = slow.optimizer.kinds  # type: ignore[attr-defined]
        assert {"full", "bit", "none"} == set(kinds)
    else:
        kinds = ["full" if t <= params["freeze_step"] else "bit" for t in range(1, STEPS + 1)]
    for answer in run_of(world, case):
        assert answer["bytes"][1:] == [sizes[kind] for kind in kinds][1:]  # building the engine counts for the first
    counted = rounds(OptimizerPlan(kind, params), STEPS)
    assert (counted.full, counted.one_bit, counted.none) == tuple(kinds.count(k) for k in ("full", "bit", "none"))


def test_the_monitors_see_the_stage(run_of):
    stages = [scalars["Train/compression_stage"] for scalars in run_of(2, "adam")[0]["scalars"]]
    assert stages == [0.0] * 6 + [1.0] * (STEPS - 6)
    intervals = [scalars["Train/local_step_interval"] for scalars in run_of(2, "zero-one")[0]["scalars"]]
    assert intervals[:9] == [1.0] * 9
    assert intervals[-1] == 4.0


def test_the_steps_of_refreshes():
    """With 16 refreshes before the interval doubles: 1 to 16, then every 2nd, 4th, 8th step, and their number."""
    schedule = RoundSchedule(10**6, 16, 1, 1)
    steps = []
    for t in range(1, 100_001):
        if schedule.refreshes(t):
            steps.append(t)
        schedule.advance(t)
    expected = [*range(1, 17), *range(18, 49, 2), *range(52, 113, 4), *range(120, 241, 8), 256, 272]
    assert steps[: len(expected)] == expected
    assert [sum(t <= last for t in steps) for last in (1000, 12_500, 100_000)] == [96, 153, 201]


def test_the_number_of_synchronisations():
    schedule = RoundSchedule(1000, 16, 1000, 16)
    count = 0
    for t in range(1, 11_001):
        count += schedule.synchronises(t)
        schedule.advance(t)
    assert count == 2250
