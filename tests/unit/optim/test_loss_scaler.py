from __future__ import annotations

import json
from typing import Any

import pytest

from engine.contracts import EngineError, SavedLayout, Stateful
from engine.optim.clipping import GlobalNormClipping, NoClipping, build_clipping
from engine.optim.loss_scaler import MAXIMUM_SCALE, LossScaler
from engine.plan.plan import LossScalePlan

LAYOUT = SavedLayout(world_size=1, zero_stage=0, mesh={}, global_batch_size=1)


def dynamic(
    initial: float = 16.0, window: int = 4, hysteresis: int = 2, consecutive: bool = False, minimum: float = 1.0
) -> LossScaler:
    return LossScaler(
        LossScalePlan(
            static=0.0,
            initial=initial,
            window_steps=window,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive,
            minimum=minimum,
        )
    )


def trace(scaler: LossScaler, flags: list[int]) -> list[float]:
    scales = []
    for flag in flags:
        scaler.update(bool(flag))
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("options", "flags", "scales"),
    [
        # Growth: first after window + 1 clean steps, then every window.
        ({}, [0] * 12, [16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64]),
        # The first overflow only uses up the hysteresis; the rise refills it.
        ({}, [1, 1, 0, 0, 0, 0, 0, 0, 1, 1], [16, 8, 8, 8, 8, 8, 16, 16, 16, 8]),
        # Used-up hysteresis is not refilled by a reduction: every further overflow halves.
        ({}, [1, 1, 1, 0, 1], [16, 8, 4, 4, 2]),
        ({"hysteresis": 1}, [1, 0, 1, 1], [8, 8, 4, 2]),
        # A clean step between overflows refills it only with consecutive_hysteresis.
        ({"consecutive": True}, [1, 0, 1, 0, 1, 1], [16, 16, 16, 16, 16, 8]),
        ({}, [1, 0, 1, 0, 1, 1], [16, 16, 8, 8, 4, 2]),
        ({"minimum": 6.0, "hysteresis": 1}, [1, 1], [8, 6]),
        ({"window": 1, "initial": 1.0}, [0, 0, 0, 1, 0, 0], [1, 2, 4, 4, 4, 8]),
    ],
)
def test_dynamic_scale_follows_deepspeed_step_by_step(
    options: dict[str, Any], flags: list[int], scales: list[int]
) -> None:
    assert trace(dynamic(**options), flags) == [float(scale) for scale in scales]


def test_overflow_at_the_minimum_exhausts_the_scaler_but_not_before() -> None:
    scaler = dynamic(initial=2.0, hysteresis=2)
    seen = []
    for _ in range(3):
        scaler.update(True)
        seen.append((scaler.scale, scaler.exhausted))
    assert seen == [(2.0, False), (1.0, False), (1.0, True)]


def test_growth_stops_at_the_cap() -> None:
    scaler = dynamic(initial=MAXIMUM_SCALE / 2, window=1)
    assert trace(scaler, [0] * 4) == [MAXIMUM_SCALE / 2, MAXIMUM_SCALE, MAXIMUM_SCALE, MAXIMUM_SCALE]


def test_static_and_neutral_scales_never_move() -> None:
    for scale in (128.0, 1.0):
        scaler = LossScaler(LossScalePlan(static=scale))
        assert trace(scaler, [1, 0, 1, 1, 1]) == [scale] * 5
        assert not scaler.exhausted
    assert LossScaler(LossScalePlan()).scale == 1.0


@pytest.mark.parametrize("cut", range(10))
def test_a_restart_at_any_step_continues_the_sequence(cut: int) -> None:
    flags = [1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    whole = trace(dynamic(), flags)
    first = dynamic()
    head = trace(first, flags[:cut])
    second = dynamic()
    assert isinstance(second, Stateful)
    second.load(json.loads(json.dumps(first.state())), LAYOUT)
    assert head + trace(second, flags[cut:]) == whole


def test_a_static_scale_ignores_a_saved_dynamic_one_and_the_reverse() -> None:
    saved = dynamic(initial=64.0).state()
    static = LossScaler(LossScalePlan(static=8.0))
    static.load(saved, LAYOUT)
    assert static.scale == 8.0
    fresh = dynamic(initial=64.0)
    fresh.load(static.state(), LAYOUT)
    assert fresh.scale == 64.0


@pytest.mark.parametrize("options", [{"hysteresis": 0}, {"window": 0}, {"initial": float("inf")}])
def test_a_scale_that_could_never_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        dynamic(**options)


def test_clipping_coefficient() -> None:
    clipping = GlobalNormClipping(2.0)
    assert clipping.coefficient(1.0) == 1.0
    assert clipping.coefficient(0.0) == 1.0
    assert clipping.coefficient(4.0) == pytest.approx(0.5, rel=1e-6)
    assert clipping.coefficient(4.0) * 4.0 <= 2.0
    assert isinstance(build_clipping(0.0), NoClipping)
    assert build_clipping(0.0).coefficient(1e9) == 1.0
    assert build_clipping(3.0).coefficient(6.0) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("maximum", [-1.0, float("nan"), float("inf")])
def test_impossible_maxima_are_refused(maximum: float) -> None:
    with pytest.raises(EngineError, match="gradient_clipping"):
        build_clipping(maximum)
