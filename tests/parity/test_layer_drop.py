"""Training with layer drop equals a loop with explicit gates, at every stage; and what depends on how a run is cut."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.model.layer_drop import LayerDrop
from tests.parity.compare import assert_equal_to
from tests.parity.layer_drop_oracle import Drop, Recount, oracle_run, recount
from tests.parity.one_bit_runs import KINDS, state_of, values_of
from tests.parity.runs import Pieces, config_of, pieces_of, step_through, train
from tests.parity.tiers import slow
from tests.parity.toy import Result, toy_model

SMALL = {"num_blocks": 4, "width": 32, "num_heads": 2}
STEPS = 6
DROP = Drop()
DECAYS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.5}
"""A decay that shows where it acts on parameters without a gradient."""
SGD = {"lr": 0.1, "momentum": 0.9}
CASES = [(2, stage, precision, 1) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
CASES += [(2, 0, "fp32", 2), (2, 3, "fp32", 2), (3, 0, "fp32", 1), (3, 3, "fp32", 2)]
"""World, stage, precision, accumulation."""


def case_config(stage: int, precision: str, accumulation: int, drop: Drop | None = DROP, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": DECAYS} if precision == "fp32" else {"type": "SGD", "params": SGD}
    # every block is gathered and reduced by itself
    apart = {"zero_optimization": {"stage3_prefetch_bucket_size": 1}} if stage == 3 else {}
    section = drop.section if drop is not None else {}
    return config_of(
        stage=stage, precision=precision, accumulation=accumulation, optimizer=optimizer, **apart, **section, **more
    )


def run_cases(world: int) -> list[tuple[Result, Pieces, dict[str, Any]]]:
    return [train(case_config(*case), STEPS, SMALL) for own, *case in CASES if own == world]


@functools.cache
def expected(world: int, precision: str, accumulation: int, compat: str | None = None) -> tuple[Result, Recount]:
    optimizer, params = ("AdamW", DECAYS) if precision == "fp32" else ("SGD", SGD)
    result = oracle_run(
        toy_model(**SMALL), Drop(compat=compat), steps=STEPS, num_parts=world * accumulation, dp=world,
        precision=precision, optimizer=optimizer, params=params,
    )  # fmt: skip
    return result, recount(Drop(compat=compat), steps=STEPS, num_layers=4, accumulation=accumulation, dp=world)


@pytest.mark.parametrize("world", [2, slow(3)])
def test_against_a_loop_with_explicit_gates(ranks: Any, world: int) -> None:
    by_rank = ranks(world).run(run_cases, world, timeout=240.0)
    for number, (_, stage, precision, accumulation) in enumerate(case for case in CASES if case[0] == world):
        reference, counted = expected(world, precision, accumulation)
        assert counted.layers > 0
        if accumulation == 1:
            assert counted.whole_windows > 0, "no layer was left out in a whole step: the case proves too little"
        tolerance = {} if precision == "fp32" else {"losses": 2e-3, "parameters": 2e-3, "norms": 2e-2}
        try:
            assert_equal_to(reference, [rank[number] for rank in by_rank], **tolerance)
        except AssertionError as error:
            raise AssertionError(f"stage {stage}, {precision}, accumulation {accumulation}: {error}") from error


def run_neutral(stage: int, precision: str) -> list[tuple[Result, Pieces]]:
    neutral = [None, Drop(theta=1.0, gamma=0.5), Drop(theta=0.3, gamma=0.0), Drop(theta=1.0 - 1e-12, gamma=0.5)]
    return [train(case_config(stage, precision, 2, drop), 3, SMALL)[:2] for drop in neutral]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
def test_at_theta_1_no_bit_differs(ranks: Any, stage: int, precision: str) -> None:
    for (plain, pieces), *found in ranks(2).run(run_neutral, stage, precision, timeout=120.0):
        for number, (result, own) in enumerate(found):
            same = all(torch.equal(a[3], b[3]) for a, b in zip(own, pieces, strict=True))
            if number < 2:
                assert result == plain
                assert same
        assert found[2][0].losses == pytest.approx(plain.losses, abs=1e-3)  # gates that are all open, and scaled


def first_step(stage: int) -> list[tuple[Result, Pieces]]:
    return [train(case_config(stage, "fp32", 1, drop), 1, SMALL)[:2] for drop in (None, DROP)]


def test_the_first_step_is_the_plain_one(ranks: Any) -> None:
    for stage in (0, 3):
        for (plain, pieces), (result, own) in ranks(2).run(first_step, stage):
            assert result == plain
            assert all(torch.equal(a[3], b[3]) for a, b in zip(own, pieces, strict=True))


def run_compat(stage: int) -> tuple[Result, Pieces, dict[str, Any]]:
    return train(case_config(stage, "fp32", 1, Drop(compat="deepspeed")), STEPS, SMALL)


def test_deepspeeds_scale_and_count(ranks: Any) -> None:
    reference, counted = expected(2, "fp32", 1, "deepspeed")
    assert counted.layers > 0
    assert_equal_to(reference, ranks(2).run(run_compat, 0))
    assert reference.losses != expected(2, "fp32", 1)[0].losses


SLICES = {"sp": {"sequence_parallel_size": 2}, "cp": {"parallel": {"context_parallel": 2}}}
FEW, STEEP = {**SMALL, "num_blocks": 2}, Drop(theta=0.2, gamma=2.0)


def run_on_slices(split: str) -> tuple[Result, Pieces, dict[str, Any]]:
    config = case_config(1, "fp32", 2, STEEP, **SLICES[split])
    model_engine, *_ = engine.initialize(model=toy_model(**FEW), config=config)
    result = step_through(model_engine, STEPS)
    counted = {"layers": model_engine.layers_skipped, "computed": model_engine.tokens_computed}
    found = result, pieces_of(model_engine), counted
    model_engine.destroy()
    return found


@pytest.mark.parametrize("split", SLICES)
def test_on_slices_of_sequences(ranks: Any, split: str) -> None:
    gates = [
        [STEEP.gate(step, micro, layer, 2, step)[0] for layer in (1, 2)] for step in range(STEPS) for micro in (0, 1)
    ]
    assert [False, False] in gates, "no forward passes by all layers"
    reference = oracle_run(
        toy_model(**FEW), STEEP, steps=STEPS, num_parts=2, dp=1, optimizer="AdamW", params=DECAYS,
    )  # fmt: skip
    counted = recount(STEEP, steps=STEPS, num_layers=2, accumulation=2, dp=1)
    by_rank = ranks(2).run(run_on_slices, split)
    assert_equal_to(reference, by_rank)
    for _, _, found in by_rank:
        assert found == {"layers": counted.layers, "computed": counted.by_step[-1][1]}


# --- resuming -----------------------------------------------------------------------------------------------------


def resume(folder: str, stage: int) -> tuple[list[float], list[float], list[int]]:
    """Losses of a run of 6 steps, of its continuation from step 3, and layers skipped in all by both."""
    config = case_config(stage, "fp32", 2)
    whole, *_ = engine.initialize(model=toy_model(dropout=0.1, **SMALL), config=config)
    step_through(whole, 3)
    whole.save_checkpoint(folder)
    losses = step_through(whole, 3, first=3).losses
    skipped = [whole.layers_skipped]
    pieces = pieces_of(whole)
    whole.destroy()
    resumed, *_ = engine.initialize(model=toy_model(seed=7, dropout=0.1, **SMALL), config=config)
    resumed.load_checkpoint(folder)
    again = step_through(resumed, 3, first=3).losses
    skipped.append(resumed.layers_skipped)
    same = all(torch.equal(a[3], b[3]) for a, b in zip(pieces, pieces_of(resumed), strict=True))
    resumed.destroy()
    return losses, again, [*skipped, int(same)]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_draws_the_same_gates(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Dropout is on: a block that is left out in the first forward draws nothing."""
    for losses, again, (skipped, skipped_again, same) in ranks(2).run(resume, str(tmp_path), stage):
        assert losses == again
        assert (skipped, same) == (skipped_again, 1)
        assert skipped > 0


# --- optimizers that send signs ------------------------------------------------------------------------------------


def run_one_bit(kind: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    """The master and the state of every parameter, before the first step and after each."""
    params = {**KINDS[kind], "lr": 1e-3, "weight_decay": 0.1}
    config = config_of(stage=0, optimizer={"type": kind, "params": params}, **DROP.section)
    model_engine, *_ = engine.initialize(model=toy_model(**SMALL), config=config)
    history = []
    for step in range(-1, 12):
        if step >= 0:
            step_through(model_engine, 1, step)
        values, state = values_of(model_engine), state_of(model_engine)
        history.append({name: {"value": value, **state[name]} for name, value in values.items()})
    model_engine.destroy()
    return history


@pytest.mark.parametrize("kind", ["OneBitAdam", slow("ZeroOneAdam"), slow("OneBitLamb")])
def test_signs_move_only_the_layers_that_were_kept(ranks: Any, kind: str) -> None:
    """0/1 Adam's ranks are apart until they synchronise, and then all moves that a layer made since."""
    first, second = ranks(2).run(run_one_bit, kind)
    num_left_out, num_together = 0, 0
    for step in range(12):
        kept = [DROP.gate(step, 0, layer, 4, step)[0] for layer in range(1, 5)]
        before, after, others = first[step], first[step + 1], second[step + 1]
        together = all(torch.equal(own[key], others[name][key]) for name, own in after.items() for key in own)
        assert together or (kind == "ZeroOneAdam" and step >= 4)
        num_together += step >= 4 and together
        if kind == "ZeroOneAdam" and step >= 4 and together:
            continue
        num_left_out += (step >= 4) * kept.count(False)
        for name, own in after.items():
            _, _, layer = name.partition("blocks.")
            moves = not layer or kept[int(layer[0])]
            assert torch.equal(own["value"], before[name]["value"]) != moves, f"{name}, step {step}"
            if not moves and (kind, step) != ("OneBitLamb", 4):  # which prepares all of its state when it switches
                assert all(torch.equal(own[key], before[name][key]) for key in own), f"state of {name}, step {step}"
    assert num_left_out > 0
    assert num_together > 0


# --- planted faults ------------------------------------------------------------------------------------------------


def gates_differ_by_rank(drop: LayerDrop, rank: int) -> None:
    drop._seed += rank


def scaling_missing(drop: LayerDrop, rank: int) -> None:
    draw = drop.draw

    def draw_unscaled(*args: Any) -> Any:
        drawn = draw(*args)
        drawn.scales = tuple(1.0 for _ in drawn.scales)
        return drawn

    drop.draw = draw_unscaled  # type: ignore[method-assign]


def micro_batches_share_a_gate(drop: LayerDrop, rank: int) -> None:
    place = drop._saved_work.place
    drop._saved_work.place = lambda: place()._replace(micro_step=0)


def theta_counts_from_1(drop: LayerDrop, rank: int) -> None:
    place = drop._saved_work.place
    drop._saved_work.place = lambda: place()._replace(applied_steps=place().applied_steps + 1)


FAULTS = [gates_differ_by_rank, scaling_missing, micro_batches_share_a_gate, theta_counts_from_1]


def run_faulty(stage: int) -> list[tuple[Result, Pieces, dict[str, Any]]]:
    found = []
    for fault in FAULTS:
        model_engine, *_ = engine.initialize(model=toy_model(**SMALL), config=case_config(stage, "fp32", 2))
        drop = model_engine.progressive_layer_drop
        assert drop is not None
        fault(drop, model_engine.mesh.rank)
        found.append((step_through(model_engine, STEPS), pieces_of(model_engine), {}))
        model_engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_faults_are_noticed(ranks: Any, stage: int) -> None:
    by_rank = ranks(2).run(run_faulty, stage, timeout=120.0)
    reference, _ = expected(2, "fp32", 2)
    for number, fault in enumerate(FAULTS):
        assert differs(reference, [rank[number] for rank in by_rank]), f"{fault.__name__} went unnoticed"


def differs(reference: Result, by_rank: list[tuple[Result, Pieces, dict[str, Any]]]) -> bool:
    try:
        assert_equal_to(reference, by_rank)
    except AssertionError:
        return True
    return False
