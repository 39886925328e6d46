"""What the 1-bit optimizers do with masks, groups, unused parameters, skipped steps, 16 bit and checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.contracts import EngineError, LossSum
from engine.optim.onebit_adam import OneBitAdam
from tests.parity.one_bit_runs import (
    KINDS,
    SlowRun,
    config_of,
    distance,
    exactly,
    inner_of,
    start,
    state_of,
    train,
    values_of,
    window,
)
from tests.parity.small import Layers, Regression, Unused, regression_batch, seeded
from tests.parity.tiers import slow
from tests.parity.toy import part

# --- warm-up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_warm_up_is_adam_without_bias_correction_and_with_it_adamw(ranks, world):
    options = {"freeze_step": 1000, "weight_decay": 0.1}
    expected = SlowRun("OneBitAdam", world, options).run(20, lambda t: False)[-1][0]
    answers = ranks(world).run(train, config_of("OneBitAdam", options), 20)
    assert all(distance(answer["values"][-1], expected) < 2e-6 for answer in answers)
    corrected = ranks(world).run(train, config_of("OneBitAdam", {**options, "bias_correction": True}), 20)
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1}}
    reference = ranks(world).run(train, config_of("AdamW", {}, optimizer=adamw), 20)
    assert distance(corrected[0]["values"][-1], reference[0]["values"][-1]) < 2e-6


def test_warm_up_of_one_bit_lamb_is_lamb_without_bias_correction(ranks):
    options = {"freeze_step": 1000, "weight_decay": 0.1}
    lamb = {"lr": 1e-2, "betas": [0.9, 0.99], "bias_correction": False, "min_coeff": 0.01, "max_coeff": 10.0}
    plain = {"type": "Lamb", "params": {**lamb, "weight_decay": 0.1}}
    (one_bit, _), (reference, _) = (
        ranks(2).run(train, config_of("OneBitLamb", options, **more), 20) for more in ({}, {"optimizer": plain})
    )
    assert distance(one_bit["values"][-1], reference["values"][-1]) < 2e-6


def read_gradients() -> list[str]:
    """Of each step: that the gradients are the same on both ranks, or why they cannot be read."""
    model_engine, found = start(config_of("OneBitAdam", {"freeze_step": 2})), []
    for step in range(4):
        batch = part(regression_batch(step), model_engine.mesh.dp_rank, 2)
        model_engine.backward(model_engine(**batch))
        try:
            gradients = model_engine.full_gradient("layers.0.weight")
            both = [torch.empty_like(gradients) for _ in range(2)]
            dist.all_gather(both, gradients)
            found.append(str(torch.equal(*both)))
        except EngineError as error:
            found.append(str(error))
        model_engine.step()
    model_engine.destroy()
    return found


def test_gradients_that_are_averaged_nowhere_cannot_be_read(ranks):
    for first, second, third, fourth in ranks(2).run(read_gradients):
        assert (first, second) == ("True", "True")
        assert all("layers.0.weight travels as 1-bit momentum" in text for text in (third, fourth))


# --- masks, groups, parameters without gradients ---------------------------------------------------------------


class Table(Regression):
    """Rows 3 and above of the table are never looked up, and ``zeros`` gets a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 8))
        self.zeros = nn.Parameter(torch.zeros(4))
        self.last = nn.Linear(8, 4)

    def predict(self, x: Tensor) -> Tensor:
        rows = (x[:, 1].abs() * 10).long() % 3
        return self.last(x + self.table[rows]) + 0.0 * self.zeros


def train_table(kind: str, mask: bool, steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    model = seeded(Table)
    rows = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]).view(6, 1)
    groups: list[dict[str, Any]] = [{"params": [model.last.weight, model.last.bias]}]
    groups.append({"params": [model.table, model.zeros]})
    if mask:
        groups[1]["exp_avg_mask"] = [rows, torch.zeros(1)]
    config = config_of(kind, KINDS[kind])
    model_engine = engine.initialize(model=model, config=config, model_parameters=groups)[0]
    for step in range(steps):
        window(model_engine, step)
    result = values_of(model_engine), state_of(model_engine)
    model_engine.destroy()
    return result


@pytest.mark.parametrize("kind", ["OneBitAdam", slow("ZeroOneAdam"), slow("OneBitLamb")])
def test_masked_rows_do_not_move_and_others_without_gradient_drift(ranks, kind):
    for values, state in ranks(2).run(train_table, kind, True, 100):
        assert torch.equal(values["table"][3:], torch.ones(3, 8))
        assert not values["zeros"].any()
        assert not state["table"]["exp_avg"][3:].any()
        assert (values["table"][:3] != 1.0).all()
    for values, _ in ranks(2).run(train_table, kind, False, 100):
        assert (values["table"][3:] != 1.0).any()
        assert values["zeros"].any()
        assert values["zeros"].abs().max() < 0.5  # it goes to and fro: what is rounded away comes back


def test_a_mask_that_does_not_fit():
    model = seeded(Table)
    groups = [{"params": [model.table], "exp_avg_mask": torch.ones(5, 1)}]
    with pytest.raises(EngineError, match=r"exp_avg_mask of table has shape \(5, 1\)"):
        engine.initialize(model=model, config=config_of("OneBitAdam", {"freeze_step": 4}), model_parameters=groups)


def train_groups(kind: str, steps: int) -> dict[str, Any]:
    """Two groups with options of their own; the second stays dense. The first layer is frozen."""
    model = seeded(Layers)
    model.layers[0].requires_grad_(False)
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.ndim <= 1 and p.requires_grad]
    groups = [{"params": matrices, "lr": 3e-3, "weight_decay": 0.5}, {"params": vectors, "non_freeze": True}]
    model_engine = engine.initialize(model=model, config=config_of(kind, KINDS[kind]), model_parameters=groups)[0]
    history: dict[str, Any] = {"bytes": [], "variances": []}
    for step in range(steps):
        window(model_engine, step)
        assert model_engine.last_report is not None
        history["bytes"].append(model_engine.last_report.bytes_by_axis.get("dp_replicate", 0))
        history["variances"].append({name: s["exp_avg_sq"] for name, s in state_of(model_engine).items()})
    history["values"] = values_of(model_engine)
    history["frozen"] = torch.equal(model.layers[0].weight, seeded(Layers).layers[0].weight)
    model_engine.destroy()
    return history


@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_non_freeze(ranks, kind):
    answers = ranks(2).run(train_groups, kind, 9)
    for answer in answers:
        assert answer["frozen"]
        for name, variance in answer["variances"][8].items():
            still = torch.equal(variance, answer["variances"][4][name])
            assert still == (variance.ndim > 1), name
    if kind != "ZeroOneAdam":
        for name, value in answers[0]["values"].items():
            assert torch.equal(value, answers[1]["values"][name]), name


def train_unused(kind: str, steps: int) -> list[dict[str, Tensor]]:
    model_engine = start(config_of(kind, {**KINDS[kind], "weight_decay": 0.1, "compression_unit": "group"}), Unused)
    history = [values_of(model_engine)]
    for step in range(steps):
        window(model_engine, step)
        history.append(values_of(model_engine))
    model_engine.destroy()
    return history


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_gradient_on_any_rank_does_not_move(ranks, kind):
    for history in ranks(2).run(train_unused, kind, 12):
        for name, value in history[-1].items():
            assert torch.equal(value, history[0][name]) == name.startswith("never"), name


# --- skipped steps, 16 bit -------------------------------------------------------------------------------------


def skip_one(kind: str, precision: dict[str, Any]) -> tuple[bool, bool, list[str], dict[str, Tensor], list[float]]:
    """6 good steps, one with an inf on rank 1 alone, one good one."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 1e-2}}
    model_engine = start(config_of(kind, KINDS[kind], scheduler=scheduler, **precision))
    for step in range(6):
        window(model_engine, step)
    inner = inner_of(model_engine)

    def everything() -> dict[str, Tensor]:
        found = {f"value {name}": value for name, value in values_of(model_engine).items()}
        found |= {f"{name} {key}": v for name, state in state_of(model_engine).items() for key, v in state.items()}
        found |= {f"rank {name}": value.clone() for name, value in inner.rank_tensors().items()}
        options = inner.param_groups[0]
        return found | {k: torch.tensor(v) for k, v in options.items() if isinstance(v, (int, float))}

    before = everything()
    loss = model_engine(**part(regression_batch(6), model_engine.mesh.dp_rank, model_engine.mesh.dp_size))
    model_engine.backward(loss * (float("inf") if model_engine.mesh.rank == 1 else 1.0))
    model_engine.step()
    after = everything()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    skipped = not model_engine.was_step_applied()
    losses = []
    for step in range(7, 20):
        window(model_engine, step)
        losses.append(model_engine.last_report.loss)  # type: ignore[union-attr]
    result = skipped, len(before) > 10, changed, values_of(model_engine), losses
    model_engine.destroy()
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "precision",
    [
        {},
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
    ],
    ids=["fp32", "fp16", "bf16"],
)
def test_an_inf_on_one_rank_touches_nothing(ranks, kind, precision):
    answers = ranks(2).run(skip_one, kind, precision)
    for skipped, looked, changed, values, losses in answers:
        assert skipped
        assert looked
        assert changed == []
        assert all(loss == pytest.approx(losses[0], abs=5.0) for loss in losses)
        assert all(value.isfinite().all() and value.dtype == torch.float32 for value in values.values())
    if kind != "ZeroOneAdam":
        assert distance(answers[0][3], answers[1][3]) == 0.0


def train_uneven(exact: bool) -> dict[str, Tensor]:
    """`LossSum` with counts that differ between ranks."""
    model_engine = start(config_of("OneBitAdam", {"freeze_step": 2, "max_update": 0.0}))
    inner = inner_of(model_engine)
    if exact:
        inner.reduce = exactly(model_engine, inner)
    rank, size = model_engine.mesh.dp_rank, model_engine.mesh.dp_size
    for step in range(5):
        whole = regression_batch(step)
        cut = {1: [slice(0, 12)], 2: [slice(0, 3), slice(3, 12)]}[size][rank]
        batch = {key: value[cut] for key, value in whole.items()}
        loss = model_engine(**batch)
        count = batch["x"].shape[0]
        model_engine.backward(LossSum(loss * count, count))
        model_engine.step()
    values = values_of(model_engine)
    model_engine.destroy()
    return values


def test_loss_sums_over_uneven_ranks(ranks):
    two, _ = ranks(2).run(train_uneven, True)
    (one,) = ranks(1).run(train_uneven, False)
    assert distance(two, one) < 1e-5


# --- many buckets, clients, convergence ------------------------------------------------------------------------


def test_many_buckets_are_one(ranks):
    """With the mean in place of its signs the cut into buckets makes no difference."""
    params = {"freeze_step": 3, "compression_unit": "bucket"}
    more = {"zero_optimization": {"stage": 0, "reduce_bucket_size": 60}}
    answers = ranks(3).run(train, config_of("OneBitAdam", params, **more), 8, exact=True)
    expected = SlowRun("OneBitAdam", 3, {"freeze_step": 3, "exact": True}).run(8, lambda t: t > 3)
    assert distance(answers[0]["values"][-1], expected[-1][0]) < 2e-5
    signs = ranks(3).run(train, config_of("OneBitAdam", params, **more), 8)
    assert distance(signs[0]["values"][-1], signs[2]["values"][-1]) == 0.0


def train_with_client(stage: int) -> dict[str, Tensor]:
    model = seeded(Layers)
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.99), freeze_step=4)
    config = {"train_batch_size": 12, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}, "seed": 0}
    model_engine = engine.initialize(model=model, config=config, optimizer=optimizer)[0]
    for step in range(8):
        window(model_engine, step)
    values = values_of(model_engine)
    model_engine.destroy()
    return values


def test_an_optimizer_of_the_users_own(ranks):
    answers = ranks(2).run(train_with_client, 0)
    section = ranks(2).run(train, config_of("OneBitAdam", {"freeze_step": 4}), 8)
    assert distance(answers[1], section[1]["values"][-1]) == 0.0
    with pytest.raises(EngineError, match="cannot train at stage 2: every rank needs the whole variance"):
        ranks(2).run(train_with_client, 2)


def test_only_an_engine_can_step_it():
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(EngineError, match=r"only engine\.step"):
        OneBitAdam([parameter]).step()


def final_loss(kind: str, params: dict[str, Any], feedback: bool) -> float:
    """The mean over the last 50 of 300 steps of fitting a fixed network's outputs, which are noisy."""
    model_engine = start(config_of(kind, params))
    if not feedback:
        inner = inner_of(model_engine)
        with_feedback = inner.reduce

        def reduce(tensors: Any) -> Any:
            for flat, tensor in with_feedback(tensors):
                flat.collective.worker_error.zero_()
                flat.collective.server_error.zero_()
                yield flat, tensor

        inner.reduce = reduce
    torch.manual_seed(7)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    losses = []
    for step in range(300):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(48, 8, generator=generator)
        y = teacher(x).detach() + 0.3 * torch.randn(48, 4, generator=generator)
        batch = part({"x": x, "y": y}, model_engine.mesh.dp_rank, model_engine.mesh.dp_size)
        model_engine.backward(model_engine(**batch))
        model_engine.step()
        losses.append(model_engine.last_report.loss)  # type: ignore[union-attr]
    model_engine.destroy()
    return sum(losses[-50:]) / 50


@pytest.mark.slow
def test_it_learns_as_adam_does_and_only_with_error_feedback(ranks):
    run = functools.partial(ranks(2).run, final_loss)
    adam = run("OneBitAdam", {"freeze_step": 1000}, True)[0]
    one_bit = run("OneBitAdam", {"freeze_step": 60}, True)[0]
    blind = run("OneBitAdam", {"freeze_step": 60}, False)[0]
    assert one_bit < 1.02 * adam
    assert blind > 1.03 * one_bit


# --- whole state while ranks are apart ---------------------------------------------------------------------------


def edited_while_apart(how: str) -> dict[str, Any]:
    """0/1 Adam stops 2 steps after a synchronisation; then a bias is read and set, and two more steps are taken."""
    rounds = {"var_freeze_step": 2, "var_update_scaler": 8, "local_step_scaler": 1, "local_step_clipper": 8}
    model_engine = start(config_of("ZeroOneAdam", {**rounds, "lr": 1e-3}))
    for step in range(6):
        window(model_engine, step)
    name = "layers.0.bias"
    found: dict[str, Any] = {"apart": inner_of(model_engine).flats[0].is_apart}
    if how == "set_full_parameters":
        found["read"] = model_engine.full_parameters()[name]
        found["moment"] = model_engine.full_optimizer_state(name, "exp_avg")
    value = torch.full((13,), 5.0)
    if how == "load_state_dict":
        model_engine.module.load_state_dict({**model_engine.module.state_dict(), name: value})
    elif how == "set_full_parameters":
        model_engine.set_full_parameters({name: value})
    else:
        with engine.full_state.gathered(model_engine.module.get_parameter(name), modifier_rank=1) as (inside,):
            if model_engine.mesh.rank == 1:
                inside.data.fill_(5.0)
    for step in range(6, 8):
        window(model_engine, step)
    found["after"] = values_of(model_engine)[name]
    model_engine.destroy()
    return found


@pytest.mark.parametrize("how", ["set_full_parameters", "load_state_dict", "gathered"])
def test_whole_state_is_one_on_all_ranks_and_edits_hold_while_ranks_are_apart(ranks, how):
    first, second = ranks(2).run(edited_while_apart, how, timeout=240)
    assert first["apart"], "the ranks were together"
    for key in first.keys() & {"read", "moment"}:
        assert torch.equal(first[key], second[key]), key
    for found in (first, second):
        assert (found["after"] - 5.0).abs().max() < 0.1
