"""Models of awkward shapes train as one plain process trains them, at every stage, on 2 and 3 ranks."""

from __future__ import annotations

import functools
import hashlib
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from tests.parity.compare import assert_equal_to
from tests.parity.runs import Pieces, assemble, pieces_of
from tests.parity.small import (
    ADAMW,
    CASES,
    VOCABULARY_SIZE,
    Case,
    config_of,
    gpt,
    plain_loop,
    run_case,
    run_steps,
    seeded,
    token_batch,
)
from tests.parity.tiers import slow
from tests.parity.toy import Result, toy_model

STEPS = 4
ACCUMULATION = 2
STAGES = range(4)


@functools.cache
def reference(name: str, num_parts: int) -> Result:
    return plain_loop(CASES[name], num_parts, STEPS, lambda groups: torch.optim.AdamW(groups, **ADAMW))


def run_all(stage: int, names: list[str]) -> list[Any]:
    """Each case's outcome, or what it raised: a case that fails alike on all ranks must not take the others along."""
    outcomes: list[Any] = []
    for name in names:
        try:
            outcomes.append(run_case(CASES[name], config_of(stage, ACCUMULATION, CASES[name]), STEPS))
        except Exception as error:
            error.add_note(traceback.format_exc())
            outcomes.append(error)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(ranks):
    """``outcomes(world, stage, name)``: what every rank gave; one call of the ranks serves all names."""

    @functools.cache
    def at(world: int, stage: int) -> dict[str, list[Any]] | Exception:
        try:
            by_rank = ranks(world).run(run_all, stage, list(CASES))
        except Exception as error:
            return error
        return {name: [rank[i] for rank in by_rank] for i, name in enumerate(CASES)}

    def of(world: int, stage: int, name: str) -> list[Any]:
        found = at(world, stage)
        for outcome in [found] if isinstance(found, Exception) else found[name]:
            if isinstance(outcome, Exception):
                raise outcome
        assert isinstance(found, dict)
        return found[name]

    return of


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, slow(3)])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(outcomes, name, world, stage):
    # batch normalisation over two samples blows rounding noise up, hence the wider norms
    expected = reference(name, world * ACCUMULATION)
    assert_equal_to(expected, outcomes(world, stage, name), norms=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, slow(3)])
def test_every_row_of_an_uneven_vocabulary_trains(outcomes, world, stage):
    after = assemble([pieces for _, pieces, _ in outcomes(world, stage, "tied")])["token_embedding.weight"]
    before = dict(CASES["tied"].model().named_parameters())["token_embedding.weight"]
    assert after.shape[0] == VOCABULARY_SIZE
    assert ((after - before).abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, slow(3)])
def test_frozen_parameters_keep_every_bit_and_have_no_state(outcomes, world, stage):
    by_rank = outcomes(world, stage, "frozen")
    after = assemble([pieces for _, pieces, _ in by_rank])
    frozen = {name: p for name, p in CASES["frozen"].model().named_parameters() if not p.requires_grad}
    assert frozen
    for name, before in frozen.items():
        assert torch.equal(after[name], before)
    for _, _, facts in by_rank:
        assert not frozen.keys() & set(facts["state"])


@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_do_not_even_decay(outcomes, stage):
    by_rank = outcomes(2, stage, "unused")
    after = assemble([pieces for _, pieces, _ in by_rank])
    before = dict(CASES["unused"].model().named_parameters())
    assert torch.equal(after["never.weight"], before["never.weight"])
    assert not torch.equal(after["rarely.weight"], before["rarely.weight"])
    assert all("never.weight" not in facts["state"] for _, _, facts in by_rank)


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_keep_dtype_and_count_micro_batches(outcomes, stage):
    for _, _, facts in outcomes(2, stage, "buffers"):
        assert facts["buffers"]["norm.num_batches_tracked"].item() == STEPS * ACCUMULATION
        assert facts["buffers"]["norm.running_mean"].abs().sum() > 0
        assert torch.equal(facts["buffers"]["offset"], torch.linspace(-1, 1, 4))


# --- 16-bit models -------------------------------------------------------------------------------------------


def train_bfloat16_model(stage: int) -> tuple[Pieces, str]:
    model = gpt().to(torch.bfloat16)
    small_steps = {"type": "AdamW", "params": {"lr": 1e-6}}
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage, 1, optimizer=small_steps))
    run_steps(model_engine, lambda step: token_batch(0), 4)
    dtype = str(next(model_engine.module.parameters()).dtype)
    pieces = pieces_of(model_engine)
    model_engine.destroy()
    return pieces, dtype


@pytest.mark.parametrize("stage", STAGES)
def test_tiny_updates_of_a_bfloat16_model_accumulate(ranks, stage):
    """Four updates of about 1e-6: each would be lost in bfloat16 (8 bits), none is in fp32 masters."""
    by_rank = ranks(2).run(train_bfloat16_model, stage)
    after = assemble([pieces for pieces, _ in by_rank])
    before = {name: p.float() for name, p in gpt().to(torch.bfloat16).named_parameters()}
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert moved.abs().max() < 5e-6
    assert moved.abs().median() > 2e-6
    assert by_rank[0][1] == ("torch.float32" if stage == 3 else "torch.bfloat16")  # stage 3 holds the masters


# --- the meta device -----------------------------------------------------------------------------------------


def hash_of_initial_parameters(stage: int, seed: int, zero: dict[str, Any] | None = None) -> Pieces:
    model = toy_model(device="meta", vocabulary_size=VOCABULARY_SIZE, num_blocks=3, width=16, num_heads=2)
    config = config_of(stage, 1, seed=seed)
    config["zero_optimization"] |= zero or {}
    model_engine, *_ = engine.initialize(model=model, config=config)
    pieces = pieces_of(model_engine)
    model_engine.destroy()
    return pieces


def digest(parameters: dict[str, Tensor]) -> str:
    parts = (f"{name} {parameters[name].numpy().tobytes().hex()}" for name in sorted(parameters))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


@functools.cache
def digest_in_one_process(seed: int) -> str:
    return digest(assemble([hash_of_initial_parameters(0, seed)]))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, slow(3)])
def test_meta_models_start_equal(ranks, world, stage):
    one_by_one = {"prefetch_bucket_size": 1}
    by_rank = ranks(world).run(hash_of_initial_parameters, stage, 5, one_by_one if stage == 3 else None)
    assert digest(assemble(by_rank)) == digest_in_one_process(5)


def test_meta_models_depend_on_the_seed():
    assert digest_in_one_process(5) != digest_in_one_process(6)


# --- groups of ranks -----------------------------------------------------------------------------------------

GROUPINGS = {
    "hpz": {"zero_hpz_partition_size": 2, "prefetch_bucket_size": 1},
    "mics": {"mics_shard_size": 2, "prefetch_bucket_size": 1},
}


def run_grouped(name: str, grouping: str) -> Any:
    case = Case(CASES[name].make, CASES[name].batch, zero=GROUPINGS[grouping])
    return run_case(case, config_of(3, 1, case), STEPS)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("name", ["tied", "tiny parameters"])
def test_groups_of_ranks(ranks, name, grouping):
    assert_equal_to(reference(name, 4), ranks(4).run(run_grouped, name, grouping))


# --- a forward at an odd moment ------------------------------------------------------------------------------


def evaluate_before_each_step(stage: int) -> tuple[Result, Pieces, dict[str, Any]]:
    case = CASES["blocks gathered one by one"]
    model_engine, *_ = engine.initialize(model=seeded(case.make), config=config_of(stage, 1, case))
    step = model_engine.step

    def look_then_step() -> None:
        with torch.no_grad():
            model_engine(**token_batch(99))
        step()

    model_engine.step = look_then_step
    result = run_steps(model_engine, case.batch, STEPS)
    outcome = result, pieces_of(model_engine), {}
    model_engine.destroy()
    return outcome


@pytest.mark.parametrize("stage", STAGES)
def test_evaluating_between_backward_and_step_changes_nothing(ranks, stage):
    assert_equal_to(reference("blocks gathered one by one", 2), ranks(2).run(evaluate_before_each_step, stage))
