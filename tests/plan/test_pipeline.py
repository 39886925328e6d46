"""The pipeline in the plan: what it resolves to, what it refuses, what it remarks."""

from __future__ import annotations

import pytest

from engine.config import ConfigError, load_config
from engine.plan import World, plan
from engine.plan.pipeline_schedules import activations_held, bubble_fraction, rank_of_stage, stages_of_rank


def resolve(world=4, **config):
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    return plan(load_config({**base, **config}), World(world, world))


def problems(**config):
    with pytest.raises(ConfigError) as raised:
        resolve(**config)
    return {problem.path: problem.message + " " + problem.repair for problem in raised.value.problems}


def test_defaults():
    resolved = resolve(pipeline={"stages": 2})
    assert resolved.degrees.pp == 2
    assert resolved.degrees.dp == 2
    assert resolved.pipeline is not None
    assert (resolved.pipeline.schedule, resolved.pipeline.partition) == ("1f1b", "parameters")
    assert (resolved.pipeline.num_micro_batches, resolved.pipeline.virtual_stages) == (8, 1)
    assert resolve(pipeline={"stages": 1}).pipeline is None
    assert resolve().pipeline is None


def test_micro_batches_are_cut_from_those_of_accumulation():
    resolved = resolve(pipeline={"stages": 2, "micro_batches": 16})
    assert resolved.pipeline is not None
    assert resolved.pipeline.num_micro_batches == 16
    found = problems(pipeline={"stages": 2, "micro_batches": 12})
    assert "12 micro-batches cannot be cut from 8 accumulation steps of 4 samples" in found["pipeline.micro_batches"]
    assert "set pipeline.micro_batches to 8" in found["pipeline.micro_batches"]


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_v_schedules_have_two_parts_a_rank(schedule):
    resolved = resolve(pipeline={"stages": 2, "schedule": schedule})
    assert resolved.pipeline is not None
    assert resolved.pipeline.virtual_stages == 2
    assert (
        "exactly 2"
        in problems(pipeline={"stages": 2, "schedule": schedule, "virtual_stages": 3})["pipeline.virtual_stages"]
    )


def test_virtual_stages_and_schedules_that_do_not_fit():
    needs = problems(pipeline={"stages": 2, "schedule": "interleaved_1f1b"})["pipeline.virtual_stages"]
    assert "needs at least 2" in needs
    assert "set pipeline.virtual_stages to 2" in needs
    assert (
        "interleaved_1f1b and zero_bubble use more"
        in problems(pipeline={"stages": 2, "virtual_stages": 2})["pipeline.virtual_stages"]
    )


def test_what_cannot_go_with_a_pipeline_is_named():
    found = problems(
        world=8,
        pipeline={"stages": 2},
        managed_gradient_accumulation=False,
        sequence_parallel_size=2,
    )
    split = {"size": 2, "plan": {"*.norm": "sequence"}}
    found |= problems(world=8, pipeline={"stages": 2}, tensor_parallel=split)
    for path in (
        "managed_gradient_accumulation",
        "sequence_parallel_size",
        "tensor_parallel.plan",
    ):
        assert "does not go with pipeline.stages 2" in found[path], path


def test_a_list_has_a_count_for_each_stage():
    assert (
        "3 counts and there are 2 stages"
        in problems(pipeline={"stages": 2, "partition": [1, 1, 1]})["pipeline.partition"]
    )


def test_too_few_micro_batches_are_told_with_the_bubble():
    few = resolve(pipeline={"stages": 4}, gradient_accumulation_steps=2)
    notes = {note.path: note.message for note in few.notes}
    assert "2 micro-batches cannot fill 4 stages: ranks are idle 60.0 % of a step" in notes["pipeline.micro_batches"]
    assert "pipeline.micro_batches" not in {note.path for note in resolve(pipeline={"stages": 4}).notes}


def test_zero_inside_a_window_is_told():
    resolved = resolve(pipeline={"stages": 2}, zero_optimization={"stage": 2})
    assert any("gradients stay whole on a rank inside" in note.message for note in resolved.notes)


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "virtual", "fraction"),
    [
        ("1f1b", 4, 8, 1, 3 / 11),
        ("gpipe", 4, 8, 1, 3 / 11),
        ("interleaved_1f1b", 4, 8, 2, 3 / 19),
        ("1f1b", 8, 32, 1, 7 / 39),
        ("interleaved_1f1b", 8, 32, 2, 7 / 71),
        ("zero_bubble", 4, 8, 1, 3 / 27),
        ("zbv", 4, 8, 2, 3 / 51),
    ],
)
def test_bubble_formulas(schedule, ranks, micro_batches, virtual, fraction):
    assert bubble_fraction(schedule, ranks, micro_batches, virtual) == pytest.approx(fraction)


def test_who_holds_what():
    assert stages_of_rank("interleaved_1f1b", 2, 2, 0) == [0, 2]
    assert stages_of_rank("zbv", 3, 2, 0) == [0, 5]
    assert [rank_of_stage("dualpipev", 2, stage) for stage in range(4)] == [0, 1, 1, 0]
    assert [activations_held("1f1b", 4, 8, rank) for rank in range(4)] == [(4,), (3,), (2,), (1,)]
    assert activations_held("gpipe", 4, 8, 0) == (8,)
    assert [activations_held("interleaved_1f1b", 4, 8, rank, 2) for rank in range(4)] == [
        (7, 4),
        (5, 4),
        (4, 3),
        (4, 1),
    ]
    assert activations_held("dualpipev", 4, 8, 0, 2) == (5, 4)
