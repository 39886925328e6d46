"""Curricula in the plan: what they come to, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ConfigError, load_config
from engine.plan import DifficultySchedule, plan
from tests.plan.conftest import MakePlan, ProblemsOf, messages

LINEAR = {
    "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}  # fmt: skip
DISCRETE = {
    "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [8, 32, 64], "max_step": [5, 10]},
}  # fmt: skip
MODEL = {"model": {"target": "model.py:GPT"}}


def legacy(**changes: Any) -> dict[str, Any]:
    return {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **LINEAR, **changes}}


def sampled(**metrics: Any) -> dict[str, Any]:
    section = {"enabled": True, "data_cluster_path": "index", "curriculum_metrics": metrics}
    return {"data_efficiency": {"seed": 5, "data_sampling": {"curriculum_learning": section}}}


def test_a_curriculum_in_the_plan(make_plan: MakePlan) -> None:
    made = make_plan(legacy(curriculum_type="seqlen_reshape"))
    assert made.curriculum is not None
    assert made.curriculum.cutting is not None
    assert made.curriculum.cutting.use == "reshape"
    assert made.curriculum.cutting.schedule == DifficultySchedule("fixed_linear", 8, 64, 100, 8)
    assert "seqlen_reshape: sequences are split into pieces of 8 to 64 tokens (fixed_linear" in made.render()
    assert make_plan({}).curriculum is None
    assert make_plan({"curriculum_learning": {"enabled": False}}).curriculum is None


def test_metrics_cut_or_choose(make_plan: MakePlan) -> None:
    made = make_plan(
        sampled(
            seqlen={**LINEAR, "clustering_type": "single_cluster"},
            vocabularyrarity={**LINEAR, "difficulty_type": "percentile"},
            own={**DISCRETE, "function": "metric.py:f"},
        )
    )
    assert made.curriculum is not None
    assert [(m.name, m.use, m.percentile) for m in made.curriculum.metrics] == [
        ("seqlen", "truncate", False),
        ("vocabularyrarity", "sample", True),
        ("own", "sample", False),
    ]
    assert (made.curriculum.index_path, made.curriculum.seed) == ("index", 5)


REFUSED = {
    "min above max": (legacy(min_difficulty=128), "min_difficulty", "128 is above max_difficulty 64"),
    "a step that does not divide the maximum": (
        legacy(max_difficulty=60),
        "schedule_config.difficulty_step",
        "8 does not divide max_difficulty 60: 60 = 7 x 8 + 4",
    ),
    "a step that does not divide the minimum": (
        legacy(min_difficulty=10),
        "schedule_config.difficulty_step",
        "8 does not divide min_difficulty 10: 10 = 1 x 8 + 2",
    ),
    "a difficulty above the maximum": (
        legacy(**{**DISCRETE, "max_difficulty": 32}),
        "schedule_config.difficulty",
        "holds 64, which is never reached: max_difficulty is 32",
    ),
    "a difficulty below the minimum": (
        legacy(**{**DISCRETE, "min_difficulty": 16}),
        "schedule_config.difficulty",
        "holds 8, which is never used: min_difficulty is 16",
    ),
    "a maximum that is never reached": (
        legacy(**{**DISCRETE, "max_difficulty": 128}),
        "max_difficulty",
        "128 is never reached: the largest of schedule_config.difficulty is 64",
    ),
    "steps out of order": (
        legacy(**{**DISCRETE, "schedule_config": {"difficulty": [8, 32, 64], "max_step": [10, 5]}}),
        "schedule_config.max_step",
        "does not ascend",
    ),
    "an unknown kind": (legacy(curriculum_type="voc"), "curriculum_type", "has no effect in DeepSpeed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_schedule_that_is_wrong_in_itself(case: str) -> None:
    settings, key, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 2, **settings})
    (problem,) = caught.value.problems
    assert problem.path == f"curriculum_learning.{key}"
    assert message in problem.message


def test_the_same_of_a_metric() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 2, **sampled(seqlen={**LINEAR, "min_difficulty": 100, "max_difficulty": 64})})
    assert "curriculum_metrics.seqlen.min_difficulty" in str(caught.value)


def test_deepspeeds_way_takes_what_deepspeed_takes(make_plan: MakePlan) -> None:
    for changes in ({"min_difficulty": 10}, {"max_difficulty": 60}, {**DISCRETE, "max_difficulty": 32}):
        made = make_plan(legacy(**changes, compat="deepspeed"))
        assert made.curriculum is not None
        assert made.curriculum.metrics[0].schedule.deepspeed


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        (sampled(voc={**LINEAR, "clustering_type": "single_cluster"}), "voc.clustering_type", "no samples by voc"),
        (sampled(seqlen_reshape=LINEAR), "seqlen_reshape.clustering_type", "cuts the sequences of every batch"),
        (
            sampled(seqlen={**LINEAR, "clustering_type": "single_cluster", "difficulty_type": "percentile"}),
            "seqlen.difficulty_type",
            "no percentile",
        ),
        (
            sampled(seqlen={**LINEAR, "clustering_type": "single_cluster", "min_difficulty": 0}),
            "seqlen.min_difficulty",
            "cannot be cut to 0 tokens",
        ),
        (
            {**legacy(), **sampled(seqlen={**LINEAR, "clustering_type": "single_cluster"})},
            "curriculum_metrics.seqlen",
            "sequences are cut by curriculum_learning already",
        ),
        (
            {**legacy(curriculum_type="seqlen_reshape"), **MODEL, "data": {"sequence_length": 127}},
            "curriculum_learning.min_difficulty",
            "127 tokens (data.sequence_length) cannot be split into equal pieces of about 8: the lengths that divide "
            "127 are 1, 127",
        ),
    ],
)
def test_what_does_not_fit_together(problems_of: ProblemsOf, settings: dict[str, Any], path: str, message: str) -> None:
    (problem,) = problems_of(settings)
    assert problem.path.endswith(path)
    assert message in problem.message


def test_notes(make_plan: MakePlan) -> None:
    made = make_plan({**legacy(), **MODEL, "training": {"steps": 50}, "data": {"sequence_length": 128}})
    assert messages(made, "curriculum_learning") == [
        "the difficulty reaches its maximum at step 100, after the last one (50)"
    ]
    assert "never sees a whole sequence: 64 is below" in messages(made, "curriculum_learning.max_difficulty")[0]
    schedule = {"total_curriculum_step": 9, "difficulty_step": 4}
    half = make_plan({**legacy(schedule_config=schedule), "fp16": {"enabled": True}})
    assert "no multiple of 8 (4)" in messages(half, "curriculum_learning.schedule_config.difficulty_step")[0]
    keys = make_plan({"sequence_keys": ["x"]})
    assert keys.curriculum is None


def test_a_decay_in_tokens_needs_no_steps(make_plan: MakePlan) -> None:
    settings = {
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_tokens": 1000}},
    }
    made = make_plan({**settings, "training": {"steps": 7}})
    assert made.schedule is not None
    assert made.schedule.params["total_num_tokens"] == 1000
    assert "total_num_steps" not in made.schedule.params


def test_the_plan_needs_no_index() -> None:
    """What lies on disk is looked at when the run is built: a plan is made on any machine."""
    assert plan(load_config({"train_batch_size": 2, **sampled(seqlen=LINEAR)})).curriculum is not None
