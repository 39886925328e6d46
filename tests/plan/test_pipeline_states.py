"""Bytes, transfers and kept micro-batches of pipeline ranks: the plan against real ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import engine
from engine.config import load_config
from engine.model.describe import describe_model
from engine.plan import World, plan
from engine.plan.activations import micro_batches_held
from engine.plan.collectives import count_collectives
from engine.plan.states import states_by_rank
from tests.parity.pipeline_models import batch_of as batch_of_layers
from tests.parity.pipeline_models import cross_entropy, seeded
from tests.parity.pipeline_runs import MODEL, window
from tests.parity.toy import toy_batch, toy_model
from tests.plan.real_counts import settings, states_held

SIZE = 16


def build(kind: str) -> nn.Module:
    return toy_model(**MODEL) if kind == "toy" else seeded(kind)


def count_real(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """What this rank holds and has sent in its second step, gradients in it."""
    model_engine, *_ = engine.initialize(model=build(kind), config=config)
    mesh, reduction = model_engine.mesh, model_engine.roles.reduction
    num_parts = config["gradient_accumulation_steps"] * mesh.dp_size
    held: dict[str, int] = {}
    finish = reduction.finish

    def look() -> None:
        finish()
        held.update(states_held(model_engine, reduction))

    before: dict[Any, Any] = {}
    for step in range(2):
        if step == 1:
            reduction.finish, before = look, dict(model_engine.ledger.sent())
        if kind == "toy":
            model_engine.train_batch(window(model_engine, step, SIZE))
        else:
            micro = range(config["gradient_accumulation_steps"])
            parts = (batch_of_layers(kind, 0, m * mesh.dp_size + mesh.dp_rank, num_parts) for m in micro)
            model_engine.train_batch(parts)
    after = model_engine.ledger.sent()
    sent = {key: (now.calls - before[key].calls, now.bytes - before[key].bytes) for key, now in after.items()}
    return {
        "held": held,
        "sent": {key: counted for key, counted in sent.items() if counted[0]},
        "place": (mesh.coordinates["pp"], mesh.dp_rank),
        "kept": model_engine.roles.forward_backward.most_held,
    }


def compare(ranks: Any, world: int, config: dict[str, Any], kind: str = "toy") -> None:
    made = plan(load_config(config), World(world, world))
    samples = made.batch.micro_batch_size

    def loss_of(model: nn.Module) -> Any:
        if kind == "toy":
            return model(**toy_batch(0, samples))
        inputs, targets = batch_of_layers(kind, 0, 0, 8 // samples)
        return cross_entropy(model(inputs), targets)

    facts = describe_model(lambda: build(kind), made, loss_of, 32)
    assert facts.forward is not None, facts.why_not_measured
    for real in ranks(world).run(count_real, config, kind, timeout=120):
        pipeline_rank, shard = real["place"]
        planned = states_by_rank(made, facts, pipeline_rank)
        assert real["held"] == {name: getattr(planned[shard % len(planned)], name) for name in real["held"]}
        assert real["kept"] == sum(micro_batches_held(made, pipeline_rank))
        if shard == 0:  # whose shards the plan speaks of
            expected: dict[tuple[str, str], tuple[int, int]] = {}
            for call in count_collectives(made, facts, pipeline_rank):
                calls, size = expected.get((call.axis, call.operation), (0, 0))
                expected[call.axis, call.operation] = (calls + call.calls, size + call.sent_bytes)
            assert real["sent"] == expected


def of(schedule: str, stage: int, micro_batches: int, stages: int = 2, **more: Any) -> dict[str, Any]:
    pipeline = {"stages": stages, "schedule": schedule}
    pipeline |= {"virtual_stages": 2} if schedule == "interleaved_1f1b" else {}
    config = settings(stage, accumulation=micro_batches, pipeline=pipeline, **more)
    return {key: value for key, value in config.items() if key != "train_micro_batch_size_per_gpu"}


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [("1f1b", 0), ("gpipe", 3), ("interleaved_1f1b", 1), ("zero_bubble", 0), ("zbv", 2), ("dualpipev", 1)],
)
def test_two_stages_alone(ranks: Any, schedule: str, stage: int) -> None:
    compare(ranks, 2, of(schedule, stage, 4, train_batch_size=SIZE))


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("1f1b", 1), ("zero_bubble", 2), ("interleaved_1f1b", 3)])
def test_two_stages_of_two_ranks(ranks: Any, schedule: str, stage: int) -> None:
    compare(ranks, 4, of(schedule, stage, 4, train_batch_size=SIZE, bf16={"enabled": stage == 2}))


@pytest.mark.parametrize("kind", ["tied_layers", "tuples"])
def test_layers_tied_over_stages_and_tuples(ranks: Any, kind: str) -> None:
    compare(ranks, 2, of("1f1b", 1, 2, train_batch_size=8), kind)


def test_four_stages_keep_what_the_formula_says(ranks: Any) -> None:
    compare(ranks, 4, of("1f1b", 0, 8, stages=4, train_batch_size=SIZE))
