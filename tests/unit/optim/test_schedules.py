from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.contracts import EngineError, SavedLayout, Stateful
from engine.optim.one_cycle import OneCycle
from engine.optim.schedule_factory import available_schedules, build_schedule
from engine.optim.schedule_state import ScheduleState
from engine.plan.plan import SchedulePlan

LAYOUT = SavedLayout(world_size=1, zero_stage=0, mesh={}, global_batch_size=1)


def optimizer(lrs: tuple[float, ...] = (1.0,), cls: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs]
    return cls(groups, lr=1.0, **options)


def sequence(scheduler: Any, num_steps: int, group: int = 0) -> list[float]:
    """The learning rates that the first ``num_steps`` optimizer steps use."""
    used = []
    for _ in range(num_steps):
        used.append(float(scheduler.optimizer.param_groups[group]["lr"]))
        assert scheduler.get_last_lr()[group] == used[-1]
        scheduler.optimizer.step()
        scheduler.step()
    return used


def build(type_name: str, target: torch.optim.Optimizer | None = None, /, **params: Any) -> Any:
    return build_schedule(SchedulePlan(type_name, params), target or optimizer())


# --- closed forms, written a second time straight from the published formulas ------------------------------------


def warmup(n: int, steps: int, kind: str) -> float:
    width = max(2, steps)
    if n < 0:
        return 0.0
    if n >= width:
        return 1.0
    return n / width if kind == "linear" else math.log(n + 1) / math.log(width)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_warmup_family_follows_deepspeeds_formulas(kind: str, steps: int) -> None:
    total = 25
    common = {"warmup_num_steps": steps, "warmup_type": kind}
    constant = sequence(build("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.9, **common), 30)
    decay = sequence(build("WarmupDecayLR", total_num_steps=total, warmup_min_lr=0.1, warmup_max_lr=0.9, **common), 30)
    cosine = sequence(
        build("WarmupCosineLR", total_num_steps=total, warmup_min_ratio=0.2, cos_min_ratio=0.05, **common), 30
    )
    width = max(2, steps)
    for j in range(30):
        n = j - 1
        assert constant[j] == pytest.approx(0.1 + 0.8 * warmup(n, steps, kind), rel=1e-12)
        g = warmup(n, steps, kind) if n < width else max(0.0, (total - n) / (total - width))
        assert decay[j] == pytest.approx(0.1 + 0.8 * g, rel=1e-12)
        if n < 0:
            ratio = 0.0
        elif n < width:
            ratio = 0.2 + 0.8 * warmup(n, steps, kind)
        else:
            x = min(1.0, (n - width + 1) / (total - width))
            ratio = 0.05 + 0.95 * (1 + math.cos(math.pi * x)) / 2
        assert cosine[j] == pytest.approx(ratio, rel=1e-12, abs=1e-15)


def test_golden_warmup_sequence() -> None:
    schedule = build("WarmupLR", warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    assert sequence(schedule, 7) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_zero_warmup_steps_means_the_full_rate_at_once() -> None:
    assert sequence(build("WarmupLR", warmup_max_lr=0.5, warmup_num_steps=0), 3) == [0.5] * 3
    decay = sequence(build("WarmupDecayLR", total_num_steps=4, warmup_max_lr=1.0, warmup_num_steps=0), 7)
    assert decay == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = sequence(build("WarmupCosineLR", total_num_steps=4, warmup_num_steps=0, cos_min_ratio=0.0), 6)
    assert cosine == pytest.approx([(1 + math.cos(math.pi * min(k, 4) / 4)) / 2 for k in range(6)])


def test_where_the_total_number_of_steps_leads() -> None:
    """After total_num_steps optimizer steps the cosine has ended; the straight line has one step to go."""
    cosine = build("WarmupCosineLR", total_num_steps=10, warmup_num_steps=2, cos_min_ratio=0.25)
    assert sequence(cosine, 11)[10] == pytest.approx(0.25)
    assert cosine.lr_at(9, 0) > 0.26
    decay = sequence(build("WarmupDecayLR", total_num_steps=10, warmup_num_steps=2, warmup_max_lr=1.0), 12)
    assert decay[10:] == pytest.approx([1 / 8, 0.0])


def test_an_absent_maximum_is_each_groups_own_rate() -> None:
    schedule = build("WarmupLR", optimizer((0.5, 0.25)), warmup_num_steps=2, warmup_type="linear")
    for _ in range(4):
        schedule.optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.25]


def test_per_group_bounds() -> None:
    schedule = build(
        "WarmupLR", optimizer((1.0, 1.0)), warmup_min_lr=[0.0, 0.1], warmup_max_lr=[1.0, 0.2], warmup_num_steps=2,
        warmup_type="linear",
    )  # fmt: skip
    assert schedule.get_last_lr() == [0.0, 0.1]
    for _ in range(2):
        schedule.optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.5, 0.15])
    with pytest.raises(EngineError, match=r"lists 3 values.*2 parameter groups"):
        build("WarmupLR", optimizer((1.0, 1.0)), warmup_min_lr=[0.0, 0.0, 0.0])


def test_range_test_golden_values() -> None:
    params = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 200, "lr_range_test_step_rate": 5.0}
    smooth = sequence(build("LRRangeTest", **params), 402)
    assert smooth[0] == 1e-4
    assert smooth[100] == pytest.approx(3.5e-4)
    assert smooth[200] == pytest.approx(6e-4)
    assert smooth[400] == pytest.approx(1.1e-3)
    stairs = sequence(build("LRRangeTest", lr_range_test_staircase=True, **params), 402)
    assert stairs[199] == 1e-4
    assert stairs[200] == stairs[399] == pytest.approx(6e-4)


def test_one_cycle_golden_values() -> None:
    schedule = build(
        "OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=1000, decay_lr_rate=0.001,
        decay_step_size=1000,
    )  # fmt: skip
    golden = {
        0: 1e-4, 1: 1.009e-4, 500: 5.5e-4, 1000: 1e-3, 1500: 5.5e-4, 2000: 1e-4, 2001: 9.99999e-5, 3000: 9.99001e-5,
        12000: 9.90099e-5,
    }  # fmt: skip
    for k, lr in golden.items():
        assert schedule.lr_at(k, 0) == pytest.approx(lr, rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "stairs", "second_stairs"), [(5, 5, 0, 0), (4, 7, 2, 3), (6, 3, 3, 0), (3, 0, 0, 0)]
)
def test_one_cycle_follows_deepspeeds_formula(first: int, second: int, stairs: int, second_stairs: int) -> None:
    schedule = build(
        "OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.9, cycle_first_step_size=first, cycle_second_step_size=second,
        cycle_first_stair_count=stairs, cycle_second_stair_count=second_stairs, decay_lr_rate=0.5, decay_step_size=4,
        decay_mom_rate=0.01,
    )  # fmt: skip
    size, ratio = first + second, first / (first + second)
    for k, lr in enumerate(sequence(schedule, 20)):
        momentum = schedule.momentum_at(k, 0)
        if k > size:
            assert lr == pytest.approx(0.1 / (1 + 0.5 * (k - size) / 4))
            assert momentum == pytest.approx(0.9 * (1 + 0.01 * (k - size) / 4))
            continue
        x = k / size - math.floor(k / size)
        f = x / ratio if x <= ratio + 1e-12 else (x - 1) / (ratio - 1)
        count = stairs if x <= ratio + 1e-12 else second_stairs
        if count:
            f = math.floor(f * count + 1e-9) / count
        assert lr == pytest.approx(0.1 + 0.8 * f)
        assert momentum == pytest.approx(0.9 - 0.1 * f)


def test_one_cycle_mirrors_the_momentum_and_leaves_beta2_alone() -> None:
    target = optimizer(betas=(0.5, 0.95))
    schedule = OneCycle(target, 0.1, 1.0, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9)
    seen = []
    for _ in range(6):
        seen.append(target.param_groups[0]["betas"])
        target.step()
        schedule.step()
    assert [beta1 for beta1, _ in seen] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.9])
    assert {beta2 for _, beta2 in seen} == {0.95}


def test_one_cycle_deepspeed_mode() -> None:
    target = optimizer()
    schedule = OneCycle(target, 0.1, 1.0, cycle_first_step_size=2, compat="deepspeed")
    assert target.param_groups[0]["betas"] == (0.8, 0.99)
    target.step()
    schedule.step()
    assert target.param_groups[0]["betas"] == pytest.approx((0.85, 0.99))


def test_one_cycle_moves_sgd_momentum_except_in_deepspeed_mode(caplog: pytest.LogCaptureFixture) -> None:
    target = optimizer(cls=torch.optim.SGD, momentum=0.3)
    OneCycle(target, 0.1, 1.0)
    assert target.param_groups[0]["momentum"] == 0.9
    target = optimizer(cls=torch.optim.SGD, momentum=0.3)
    OneCycle(target, 0.1, 1.0, compat="deepspeed")
    assert target.param_groups[0]["momentum"] == 0.3
    assert "not cycled" in caplog.text


def test_one_cycle_refuses_a_momentum_that_would_reach_one() -> None:
    target = optimizer()
    schedule = OneCycle(target, 0.1, 1.0, cycle_first_step_size=1, decay_mom_rate=1.0, decay_step_size=1)
    target.step()
    schedule.step()
    schedule.step()
    with pytest.raises(EngineError, match="decay_mom_rate"):
        schedule.step()


def test_tensor_learning_rates_are_filled_in_place() -> None:
    lr = torch.tensor(1.0)
    parameter = torch.nn.Parameter(torch.ones(1))
    target = torch.optim.AdamW([parameter], lr=lr, capturable=False, foreach=False)
    schedule = build("WarmupLR", target, warmup_max_lr=0.5, warmup_num_steps=0)
    held = target.param_groups[0]["lr"]
    target.step()
    schedule.step()
    assert target.param_groups[0]["lr"] is held
    assert float(held) == 0.5


def test_without_a_plan_the_rates_stay_the_users() -> None:
    target = optimizer((0.5,))
    schedule = build_schedule(None, target)
    target.step()
    schedule.step()
    target.param_groups[0]["lr"] = 0.125
    assert schedule.get_last_lr() == [0.125]
    target.step()
    schedule.step()
    assert target.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("k", [0, 1, 7])
def test_last_batch_iteration_starts_in_the_middle(k: int) -> None:
    params = {"total_num_steps": 20, "warmup_num_steps": 4, "warmup_max_lr": 1.0}
    assert (
        build("WarmupDecayLR", last_batch_iteration=k - 1, **params).get_last_lr()
        == [sequence(build("WarmupDecayLR", **params), k + 1)[k]]
    )  # fmt: skip


CASES = [
    ("WarmupLR", {"warmup_num_steps": 4}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2}),
    ("CosineAnnealingLR", {"T_max": 9}),
    ("StepLR", {"step_size": 3}),
    ("MultiStepLR", {"milestones": [2, 5, 5, 8]}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    ("OneCycleLR", {"max_lr": 1.0, "total_steps": 12}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 3}),
    ("LinearLR", {"total_iters": 6}),
    ("PolynomialLR", {"total_iters": 6}),
    ("ConstantLR", {"total_iters": 3}),
]


@pytest.mark.parametrize(("type_name", "params"), CASES, ids=[name for name, _ in CASES])
def test_every_schedule_resumes_exactly_from_json(type_name: str, params: dict[str, Any]) -> None:
    whole_optimizer = optimizer((0.5,))
    whole = sequence(build(type_name, whole_optimizer, **params), 11)
    first = build(type_name, optimizer((0.5,)), **params)
    sequence(first, 6)
    saved = json.loads(json.dumps(ScheduleState(first).state(), allow_nan=False))
    second = build(type_name, optimizer((0.5,)), **params)
    restored = ScheduleState(second)
    assert isinstance(restored, Stateful)
    restored.load(saved, LAYOUT)
    assert second.get_last_lr() == first.get_last_lr()
    assert sequence(second, 5) == whole[6:]
    assert second.optimizer.param_groups[0]["betas"] == whole_optimizer.param_groups[0]["betas"]


def test_client_schedulers_of_any_kind_are_stateful() -> None:
    def chained(target: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.SequentialLR(
            target,
            [
                torch.optim.lr_scheduler.LinearLR(target, 0.1, total_iters=3),
                torch.optim.lr_scheduler.LambdaLR(target, lambda k: 0.9**k),
            ],
            milestones=[3],
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = sequence(chained(optimizer()), 8)
        first = chained(optimizer())
        sequence(first, 5)
        saved = json.loads(json.dumps(ScheduleState(first).state()))
        second = chained(optimizer())
        ScheduleState(second).load(saved, LAYOUT)
        assert sequence(second, 3) == whole[5:]

    class Bare:
        def step(self) -> None: ...

    state = ScheduleState(Bare()).state()
    assert state == {"type": "Bare", "scheduler": {}, "groups": []}
    ScheduleState(Bare()).load(state, LAYOUT)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer())
    restored = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer())
    ScheduleState(restored).load(json.loads(json.dumps(ScheduleState(plateau).state(), allow_nan=False)), LAYOUT)
    assert restored.best == math.inf


def test_the_state_of_another_scheduler_is_refused() -> None:
    saved = ScheduleState(build("WarmupLR")).state()
    with pytest.raises(EngineError, match=r"WarmupLR.*ExponentialLR.*load_lr_scheduler_states"):
        ScheduleState(build("ExponentialLR", gamma=0.5)).load(saved, LAYOUT)
    with pytest.raises(EngineError, match=r"1 parameter groups.*has 2"):
        ScheduleState(build("WarmupLR", optimizer((1.0, 1.0)))).load(saved, LAYOUT)


@pytest.mark.parametrize(
    ("type_name", "params", "message"),
    [
        ("warmuplr", {}, "Did you mean 'WarmupLR'"),
        ("math", {}, "unknown"),
        ("LRScheduler", {}, "unknown"),
        ("ReduceLROnPlateau", {}, "metric"),
        ("LambdaLR", {}, "Python function"),
        ("SequentialLR", {}, "scheduler objects"),
        ("WarmupLR", {"warmup_steps": 5}, "warmup_steps is not a parameter.*warmup_num_steps=1000"),
        ("WarmupDecayLR", {}, "total_num_steps is missing"),
        ("CosineAnnealingLR", {}, "T_max is missing"),
        ("WarmupLR", {"warmup_type": "cosine"}, "log"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "whole number"),
        ("WarmupLR", {"warmup_num_steps": -1}, "whole number"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "at least 1"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "compat": "x"}, "compat"),
        ("PolynomialLR", {"total_iters": 5, "power": 1.0, "foo": 1}, "foo is not a parameter"),
    ],
)
def test_bad_schedules_are_told_in_one_message(type_name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        build(type_name, **params)


def test_every_listed_schedule_is_a_schedule() -> None:
    names = available_schedules()
    assert names[:5] == ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle"]
    assert {"CosineAnnealingLR", "ExponentialLR", "OneCycleLR"} <= set(names)
    assert not {"LRScheduler", "LambdaLR", "ReduceLROnPlateau"} & set(names)


ONE_CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_min_mom": 0.5, "cycle_max_mom": 0.95}


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 10, "warmup_max_lr": 0.1}},
        {"type": "OneCycle", "params": {**ONE_CYCLE, "cycle_first_step_size": 4}},
    ],
)
def test_a_load_without_the_schedule_leaves_what_it_has_set(scheduler: dict[str, Any], tmp_path: Path) -> None:
    def start(**more: Any) -> engine.Engine:
        sgd = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}
        config = {"train_batch_size": 1, "optimizer": sgd, **more}
        return engine.initialize(model=torch.nn.Linear(2, 2), config=config)[0]

    def is_set(model_engine: engine.Engine) -> list[tuple[float, float]]:
        assert model_engine.optimizer is not None
        return [(group["lr"], group["momentum"]) for group in model_engine.optimizer.param_groups]

    saved, resumed = start(), start(scheduler=scheduler)
    saved.save_checkpoint(tmp_path)
    before = is_set(resumed)
    assert before != is_set(saved)
    resumed.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert is_set(resumed) == before
    saved.destroy()
    resumed.destroy()
