"""The plan as people see it, word for word."""

from __future__ import annotations

from engine.plan import ModelFacts, render_plan, render_values
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

SUMMARY = """\
world      2 ranks (torchrun variables) on cpu
mesh       dp_shard 2
batch      24 samples [user] = 4 micro [user] x 3 accumulation [derived] x 2 dp
precision  bf16, fp32 masters
gradients  accumulated in fp32, reduced in fp32 to their mean
zero       stage 2 [user]: optimizer state and gradients are sharded over 2 ranks
           gradients travel in buckets of 6,553,600 elements [derived]
optimizer  AdamW: lr 0.0003 [user], betas [0.9, 0.999], eps 1e-08, weight_decay 0
schedule   WarmupCosineLR: warmup_min_ratio 0, cos_min_ratio 0.0001, warmup_num_steps 10 [user], warmup_type log,
             total_num_steps 200 [derived]
clipping   global norm 1
run        200 steps, seed 1234
monitors   tensorboard
model      12,000,000 parameters, 10,000,000 of them trainable, 8 blocks
memory     per rank 104 MB = 24 MB parameters, 20 MB gradients, 60 MB optimizer state; activations come on top
4 notes
  data_types.grad_accum_dtype: gradients of the bf16 model are accumulated and reduced in fp32 (DeepSpeed: in bf16)
  gradient_clipping: gradients are clipped to norm 1 as in DeepSpeed; 0 switches clipping off
  optimizer.type: Adam is AdamW, as in DeepSpeed: weights decay apart from the gradient; adam_w_mode false gives Adam
  zero_optimization.overlap_comm: no effect: communication always overlaps where the boundary is known"""


def test_the_summary(make_plan: MakePlan) -> None:
    made = make_plan(SETTINGS, 2, FACTS, how="torchrun variables")
    assert made.render() == SUMMARY


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
        "8 ranks on cpu, 4 per node",
        "dp_replicate 2 x dp_shard 4",
        "dynamic from 65536",
        "over 4 ranks in 2 replicas",
        "parameters stay sharded over 2 ranks",
        "Muon for matrices: lr 0.02",
        "Adam for the rest: lr 0.0003",
        "clipping    off",
    ):
        assert phrase in text


def test_one_rank_and_nothing_else(make_plan: MakePlan) -> None:
    text = make_plan({}).render()
    assert "one rank" in text
    assert "none in the config" in text
    assert "monitors   none" in text


def test_long_lines_are_broken_between_words(make_plan: MakePlan) -> None:
    plan = make_plan(SETTINGS, 2)
    narrow, wide = render_plan(plan, 60).splitlines(), render_plan(plan, 10_000).splitlines()
    assert max(map(len, narrow)) <= 60 < max(map(len, wide))
    assert " ".join(narrow).split() == " ".join(wide).split()
