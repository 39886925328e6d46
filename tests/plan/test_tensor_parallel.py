"""What the tensor-parallel degree must divide."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import load_config
from engine.config.messages import ConfigError
from engine.plan import ModelFacts, World, plan
from engine.plan.tensor_parallel import SplitSizes, fitting_degrees, split_problems, vocabulary_note

SIZES = SplitSizes(12, 4, 50257, (("outputs of the MLP's first layer", 3072),))
FACTS = ModelFacts(10**6, 10**6, split_sizes=SIZES)


def planned(tp, facts=FACTS, **section):
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"size": tp, **section}}
    return plan(load_config(config), World(size=tp, local_size=tp), facts)


def test_degrees_that_divide_all_numbers():
    assert fitting_degrees(SIZES) == [1, 2, 4]
    assert fitting_degrees(SplitSizes()) == []


def test_every_number_that_does_not_divide_is_told_with_its_arithmetic_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        planned(8)
    text = str(caught.value)
    assert "8 ranks cannot share 12 attention heads: 12 = 1 x 8 + 4" in text
    assert "8 ranks cannot share 4 key-value heads: 4 = 0 x 8 + 4" in text
    assert "set tensor_parallel.size to 4" in text
    assert {problem.path for problem in caught.value.problems} == {"tensor_parallel.size"}
    assert {problem.allowed for problem in caught.value.problems} == {"1, 2, 4"}


def test_widths_count_as_well():
    (sentence, repair), *others = split_problems(SplitSizes(8, 8, widths=(("outputs", 100),)), 8)
    assert not others
    assert sentence == "8 ranks cannot share 100 outputs: 100 = 12 x 8 + 4"
    assert repair == "set tensor_parallel.size to 4"


def test_a_vocabulary_is_cut_unevenly_and_that_is_told():
    notes = [note.message for note in planned(4).notes if note.path == "tensor_parallel.size"]
    assert notes == [vocabulary_note(SIZES, 4)]
    assert "3 parts of 12,565 and a last one of 12,562" in notes[0]
    assert vocabulary_note(dataclasses.replace(SIZES, vocabulary_size=50304), 4) == ""


def test_a_vocabulary_too_small_for_its_ranks_stays_whole():
    sizes = SplitSizes(8, 8, vocabulary_size=5)
    assert split_problems(sizes, 4) == []
    assert "would leave the last of 4 ranks none: it is whole" in vocabulary_note(sizes, 4)


def test_a_plan_in_the_json_may_leave_attention_whole():
    assert planned(8, plan={"*.up": "column", "*.down": "row"}).degrees.tp == 8


def test_without_the_model_nothing_is_said():
    assert planned(8, facts=None).degrees.tp == 8


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor", "OneBitLamb"])
def test_optimizers_that_need_whole_tensors_are_refused_by_name(optimizer):
    config = load_config(
        {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"size": 2}, "optimizer": {"type": optimizer}}
    )
    with pytest.raises(ConfigError) as caught:
        plan(config, World(size=4))
    (problem,) = caught.value.problems
    assert problem.path == "optimizer.type"
    assert optimizer in problem.message
    assert "AdamW" in problem.allowed
