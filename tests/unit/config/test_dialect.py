"""Older and stray spellings: each is read as what it means, with a note."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import load_config
from engine.config.aliases import ALIASES, CURRENT
from engine.config.places import join_path, parse_path
from tests.unit.config.conftest import Write, notes_of, paths_of, problems_of

NOT_IN_NOTES = "no note"

READINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: what is written, what stands in `raw`, the path of the note
    "bfloat16": ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}, "bfloat16"),
    "stage3": (
        {"zero_optimization": {"stage3_max_reuse_distance": 3}},
        {"zero_optimization": {"max_reuse_distance": 3}},
        "",
    ),
    "fp16 weights": (
        {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
        {"zero_optimization": {"gather_16bit_weights_on_model_save": True}},
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    ),
    "cpu_offload": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.cpu_offload",
    ),
    "cpu_offload off": (
        {"zero_optimization": {"cpu_offload": False}},
        {"zero_optimization": {}},
        "zero_optimization.cpu_offload",
    ),
    "cpu_offload as text": (
        {"zero_optimization": {"cpu_offload": "true"}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.cpu_offload",
    ),
    "cpu_offload beside offload_optimizer": (
        {"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.cpu_offload",
    ),
    "cpu_offload_params": (
        {"zero_optimization": {"cpu_offload_params": True}},
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        "zero_optimization.cpu_offload_param",
    ),
    "pin memory": (
        {"zero_optimization": {"cpu_offload": True, "cpu_offload_use_pin_memory": False}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        "zero_optimization.cpu_offload_use_pin_memory",
    ),
    "zero as true": ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}, "zero_optimization"),
    "zero as false": ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}, "zero_optimization"),
    "zero as true with its bucket": (
        {"zero_optimization": True, "allgather_size": 9},
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 9}},
        "allgather_size",
    ),
    "loss scale in bf16": ({"bf16": {"loss_scale": 0, "hysteresis": 2}}, {"bf16": {}}, "bf16.hysteresis"),
    "opt_level": ({"fp16": {"opt_level": "O2"}}, {"fp16": {}}, "fp16.opt_level"),
    "grad_hooks": (
        {"zero_optimization": {"grad_hooks": False}},
        {"zero_optimization": {}},
        "zero_optimization.grad_hooks",
    ),
    "legacy_stage1": (
        {"zero_optimization": {"stage": 1, "legacy_stage1": True}},
        {"zero_optimization": {"stage": 1}},
        "zero_optimization.legacy_stage1",
    ),
    "thread_count": ({"aio": {"thread_count": 8}}, {"aio": {"intra_op_parallelism": 8}}, "aio.thread_count"),
    "prefer_large_batch": (
        {"elasticity": {"prefer_large_batch": False}},
        {"elasticity": {"prefer_larger_batch": False}},
        "elasticity.prefer_large_batch",
    ),
    "integral float": ({"train_batch_size": 8.0}, {"train_batch_size": 8}, "train_batch_size"),
    "integer as text": ({"train_batch_size": "8"}, {"train_batch_size": 8}, "train_batch_size"),
    "exponent as text": (
        {"zero_optimization": {"reduce_bucket_size": "5e8"}},
        {"zero_optimization": {"reduce_bucket_size": 500_000_000}},
        "zero_optimization.reduce_bucket_size",
    ),
    "number as text": ({"gradient_clipping": "0.5"}, {"gradient_clipping": 0.5}, "gradient_clipping"),
    "truth as text": ({"prescale_gradients": "False"}, {"prescale_gradients": False}, "prescale_gradients"),
    "truth as number": ({"fp16": {"enabled": 1}}, {"fp16": {"enabled": True}}, "fp16.enabled"),
    "capitals": (
        {"zero_optimization": {"offload_optimizer": {"device": "CPU"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device",
    ),
    "dtype by another name": (
        {"data_types": {"grad_accum_dtype": "torch.bfloat16"}},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        "data_types.grad_accum_dtype",
    ),
    "optimizer in capitals": ({"optimizer": {"type": "LAMB"}}, {"optimizer": {"type": "Lamb"}}, "optimizer.type"),
    "torch optimizer in small letters": (
        {"optimizer": {"type": "sgd"}},
        {"optimizer": {"type": "SGD"}},
        "optimizer.type",
    ),
    "schedule in small letters": (
        {"scheduler": {"type": "warmuplr"}},
        {"scheduler": {"type": "WarmupLR"}},
        "scheduler.type",
    ),
    "lr as text": (
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}},
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}},
        "optimizer.params.lr",
    ),
    "warm-up as float": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100.0}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}},
        "scheduler.params.warmup_num_steps",
    ),
    "dynamic": ({"fp16": {"loss_scale": "dynamic"}}, {"fp16": {"loss_scale": 0}}, "fp16.loss_scale"),
    "one class for a list": (
        {"zero_optimization": {"leaf_module": {"classes": "a.B"}}},
        {"zero_optimization": {"leaf_module": {"classes": ["a.B"]}}},
        "zero_optimization.leaf_module.classes",
    ),
    "output path as documented": (
        {"tensorboard": {"enabled": True, "output_path": None}},
        {"tensorboard": {"enabled": True}},
        "tensorboard.output_path",
    ),
    "fp32 all-reduce": ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}, "fp32_allreduce"),
    "fp32 all-reduce off": ({"fp32_allreduce": False}, {}, "fp32_allreduce"),
    "null section": ({"bf16": None}, {}, "bf16"),
}


@pytest.mark.parametrize(("written", "raw", "noted"), READINGS.values(), ids=READINGS.keys())
def test_a_spelling_is_read_as_what_it_means(written: dict[str, Any], raw: dict[str, Any], noted: str) -> None:
    config = load_config(written)
    assert config.raw == raw
    notes = notes_of(written)
    assert (noted in notes) if noted else (notes == {})
    again = load_config(config.raw)
    assert again == config
    assert again.raw == raw


def test_floats_for_integers_share_one_note(write: Write) -> None:
    path = write('{"zero_optimization": {\n"reduce_bucket_size": 5e8,\n"stage3_prefetch_bucket_size": 5e7}}')
    (note,) = load_config(path).notes
    assert note.line == 2
    assert "reduce_bucket_size = 500000000" in note.message
    assert "stage3_prefetch_bucket_size = 50000000" in note.message


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "bfloat16 and bf16": ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bfloat16"),
    "both spellings": (
        {"zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 2}},
        "zero_optimization.stage3_max_live_parameters",
    ),
    "cpu_offload and nvme": (
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
        "zero_optimization.cpu_offload",
    ),
    "fp32 all-reduce and another dtype": (
        {"fp32_allreduce": True, "communication_data_type": "bf16"},
        "fp32_allreduce",
    ),
    "cpu_offload of another type": ({"zero_optimization": {"cpu_offload": "maybe"}}, "zero_optimization.cpu_offload"),
}


@pytest.mark.parametrize(("written", "path"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_contradicting_spellings_are_refused(written: dict[str, Any], path: str) -> None:
    assert paths_of(written) == [path]


def test_both_spellings_with_one_value_are_fine() -> None:
    tree = {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}
    assert load_config(tree).bf16.enabled


def test_problems_keep_the_users_spelling(write: Write) -> None:
    path = write(
        '{"bfloat16": {"enabledd": true}, "zero_optimization": {"stage3_max_live_parameters": -1, "cpu_offload": 3}}'
    )
    found = {problem.path: problem.column for problem in problems_of(path)}
    assert found == {
        "bfloat16.enabledd": 15,
        "zero_optimization.stage3_max_live_parameters": 86,
        "zero_optimization.cpu_offload": 90,
    }


@pytest.mark.parametrize("old", ALIASES, ids=join_path)
def test_every_alias_leads_to_a_known_key(old: tuple[str | int, ...]) -> None:
    from engine.config.suggest import known_paths

    new = load_config({})._provenance.places.canonical(old)
    dropped_later = ("cpu_offload_param", "cpu_offload_use_pin_memory")
    assert join_path(new[:-1]) in known_paths().get(str(new[-1]), ()) or new[-1] in dropped_later
    assert parse_path(join_path(old)) == old
    if old in CURRENT:
        assert old[:-1] == new[:-1]


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "fraction": ({"train_micro_batch_size_per_gpu": 2.5}, "only a whole number can be meant"),
    "fraction in zero": ({"zero_optimization": {"reduce_bucket_size": 0.9}}, "only a whole number can be meant"),
    "truth for a number": ({"zero_optimization": {"stage": True}}, "an integer from 0 to 3"),
    "text for a number": ({"train_batch_size": "many"}, "an integer >= 1"),
    "number for a truth": ({"dump_state": 2}, "true or false"),
    "number for text": ({"communication_data_type": 16}, '"fp32", "fp16" or "bf16"'),
    "list for a number": ({"seed": [1]}, "an integer >= 0"),
    "number for a section": ({"zero_optimization": 2}, 'write {"stage": 2}'),
    "truth for a section": ({"bf16": True}, 'write {"enabled": true}'),
    "text for a section": ({"optimizer": "AdamW"}, 'write {"type": "AdamW"}'),
    "a device for a section": ({"zero_optimization": {"offload_param": "cpu"}}, 'write {"device": "cpu"}'),
    "a list for a section": ({"fp16": [True]}, "an object"),
    "an integer beyond all bounds": ({"train_batch_size": 1e64}, "an integer >= 1"),
    "null where a number must be": ({"gradient_clipping": None}, "leave the key out"),
    "null for text": ({"tensorboard": {"job_name": None}}, "text in quotes"),
    "infinite number as text": ({"gradient_clipping": "inf"}, "a number >= 0"),
}


@pytest.mark.parametrize(("written", "words"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_meant_is_refused(written: dict[str, Any], words: str) -> None:
    (problem,) = problems_of(written)
    assert words in problem.render()
