"""The plan as people see it, word for word."""

from __future__ import annotations

from textwrap import dedent

from engine.plan import ModelFacts, render_values

from tests.plan.conftest import MakePlan

SETTINGS = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}},
    "tensorboard": {"enabled": True},
    "training": {"steps": 200},
}
FACTS = ModelFacts(12_000_000, 10_000_000, blocks=tuple(f"h.{index}" for index in range(8)))


def test_the_summary(make_plan: MakePlan) -> None:
    made = make_plan(SETTINGS, 2, FACTS, how="torchrun variables")
    assert made.render() == dedent("""\
        """)


def test_an_explained_value_has_its_origin_and_reason(make_plan: MakePlan) -> None:
    lines = {line.split()[0]: line for line in render_values(make_plan(SETTINGS, 2)).splitlines()}
    assert lines["train_batch_size"].split()[1:] == ["24", "user"]
    assert "derived  24 samples = 4 micro x 3 accumulation x 2 dp" in lines["gradient_accumulation_steps"]
    assert "training.steps" in lines["scheduler.params.total_num_steps"]


def test_stage_three_fp16_and_muon(make_plan: MakePlan) -> None:
    text = make_plan(
        {
            "fp16": {"enabled": True},
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 2},
            "optimizer": {"type": "Muon", "params": {}},
        },
        8,
        local_size=4,
    ).render()
    for phrase in (
        "world size 8 on cpu, 4 per node",
        "dp_replicate 2 x dp_shard 4",
        "dynamic from 65536",
        "over 4 ranks in 2 replicas",
        "parameters stay sharded over 2 ranks",
        "Muon muon: lr 0.02",
        "adam: lr 0.0003",
        "clipping    off",
    ):
        assert phrase in text


def test_one_rank_and_nothing_else(make_plan: MakePlan) -> None:
    text = make_plan({}).render()
    assert "one rank" in text
    assert "none in the config" in text
    assert "monitors    none" in text
