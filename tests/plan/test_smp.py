"""What SMP's parameters promise against the degrees of a world."""

from __future__ import annotations

from typing import Any

import pytest

from tests.building import building
from tests.plan.conftest import MakePlan, ProblemsOf, messages

UNDER_CONSTRUCTION = ("tensor_parallel.size", "pipeline.stages")


def test_a_placement_of_smp_places_the_ranks(make_plan: MakePlan) -> None:
    parameters = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "placement_strategy": "spread"}
    with building(*UNDER_CONSTRUCTION):
        made = make_plan({"smp": {**parameters, "prescaled_batch": True}}, 8)
    assert (made.degrees.placement, made.degrees.tp, made.degrees.pp, made.degrees.dp) == ("TPD", 2, 2, 2)
    assert "tp 2 x pp 2 x dp_replicate 2" in made.render()
    assert not messages(made, "smp")


def test_what_smp_does_by_default_and_this_engine_does_not(make_plan: MakePlan) -> None:
    with building(*UNDER_CONSTRUCTION):
        made = make_plan({"smp": {"tensor_parallel_degree": 2}}, 4)
    prescaled, placed = messages(made, "smp")
    assert "the 2 ranks that share each layer always get the same samples" in prescaled
    assert placed == 'parallel.placement is PDT; SMP places by "cluster" unless placement_strategy says otherwise'


@pytest.mark.parametrize(
    ("parameters", "world", "path", "words"),
    [
        ({"horovod": True}, 1, "smp.horovod", "no TensorFlow"),
        ({"ddp": False}, 2, "smp.ddp", "averaged over the 2 data-parallel ranks"),
        ({"ddp": False, "tensor_parallel_degree": 2}, 2, "smp.ddp", "SMP itself needs ddp"),
        ({"tensor_parallel_degree": 2, "prescaled_batch": False}, 2, "smp.prescaled_batch", "the same samples"),
        ({"partitions": 4, "active_microbatches": 2}, 4, "smp.active_microbatches", "2 is too few"),
    ],
)
def test_promises_that_cannot_be_kept(
    problems_of: ProblemsOf, parameters: dict[str, Any], world: int, path: str, words: str
) -> None:
    with building(*UNDER_CONSTRUCTION):
        (problem,) = problems_of({"smp": parameters}, world)
    assert problem.path == path
    assert words in problem.message


def test_promises_that_are_kept_are_notes(make_plan: MakePlan) -> None:
    with building(*UNDER_CONSTRUCTION):
        made = make_plan({"smp": {"ddp": True, "partitions": 2, "active_microbatches": 4, "prescaled_batch": True}}, 4)
        alone = make_plan({"smp": {"ddp": False, "active_microbatches": 4}}, 1)
    assert "implied" in messages(made, "smp.ddp")[0]
    assert "2" in messages(made, "smp.active_microbatches")[0]
    assert "without tensor parallelism" in messages(made, "smp.prescaled_batch")[0]
    assert messages(alone, "smp.active_microbatches") == ["has no effect without a pipeline"]


def test_degrees_that_do_not_multiply_are_told_in_the_words_of_the_file(problems_of: ProblemsOf) -> None:
    with building(*UNDER_CONSTRUCTION):
        (problem,) = problems_of({"smp": {"tensor_parallel_degree": 4}}, 2)
    assert problem.path == "smp.tensor_parallel_degree"
