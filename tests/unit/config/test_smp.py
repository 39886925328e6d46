"""``"smp"``: each parameter of SageMaker's library becomes the key that means the same, or is noted, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, ConfigError, examine, load_config
from engine.config.sections.smp import SmpSection
from engine.config.smp import NUMBERS, SHARDED_NUMBERS, SWITCHES, WITHOUT_EFFECT

MOVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pipeline_parallel_degree": 2}, {"pipeline": {"stages": 2}}),
    ({"partitions": 2}, {"pipeline": {"stages": 2}}),
    ({"partitions": 2, "pipeline_parallel_degree": 2}, {"pipeline": {"stages": 2}}),
    ({"tensor_parallel_degree": 4}, {"tensor_parallel": {"size": 4}}),
    ({"tensor_parallel_degree": "4"}, {"tensor_parallel": {"size": 4}}),
    ({"context_parallel_degree": 2}, {"parallel": {"context_parallel": 2}}),
    ({"microbatches": 4.0}, {"gradient_accumulation_steps": 4}),
    ({"random_seed": 7}, {"seed": 7}),
    ({"placement_strategy": "cluster"}, {"parallel": {"placement": "DPT"}}),
    ({"placement_strategy": "spread"}, {"parallel": {"placement": "TPD"}}),
    ({"placement_strategy": "dtp"}, {"parallel": {"placement": "DTP"}}),
    ({"fp16": True}, {"fp16": {"enabled": True}}),
    ({"fp16": True, "fp16_params": True}, {"fp16": {"enabled": True}}),
    ({"bf16": "true"}, {"bf16": {"enabled": True}}),
    ({"shard_optimizer_state": True}, {"zero_optimization": {"stage": 1}}),
    ({"offload_activations": True}, {"activation_checkpointing": {"cpu_checkpointing": True}}),
    ({"sm_activation_offloading": True}, {"activation_checkpointing": {"cpu_checkpointing": True}}),
    ({"sharded_data_parallel_degree": 4}, {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}),
    (
        {
            "sharded_data_parallel_degree": 4,
            "sdp_reduce_bucket_size": 5e8,
            "sdp_param_persistence_threshold": 10,
            "sdp_max_live_parameters": 1000,
            "sdp_hierarchical_allgather": True,
            "sdp_gradient_clipping": 0.5,
        },
        {
            "zero_optimization": {
                "stage": 3,
                "mics_shard_size": 4,
                "reduce_bucket_size": 500_000_000,
                "param_persistence_threshold": 10,
                "max_live_parameters": 1000,
                "mics_hierarchical_params_gather": True,
            },
            "gradient_clipping": 0.5,
        },
    ),
    ({"hybrid_shard_degree": 0}, {"zero_optimization": {"stage": 3}}),
    ({"hybrid_shard_degree": 1}, {"zero_optimization": {"stage": 0}}),
    ({"hybrid_shard_degree": 8}, {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}),
    (
        {"hybrid_shard_degree": 8, "context_parallel_degree": 2},
        {"parallel": {"context_parallel": 2}, "zero_optimization": {"stage": 3, "mics_shard_size": 4}},
    ),
    ({"expert_parallel_degree": 2}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
]

ASKS_FOR_NOTHING = [
    {"fp16": False},
    {"fp16_params": False},
    {"bf16": False},
    {"shard_optimizer_state": False},
    {"offload_activations": False},
    {"sharded_data_parallel_degree": 1},
    {"expert_parallel_degree": 1},
]


def without_smp(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.resolved().items() if key != "smp"}


@pytest.mark.parametrize(("parameters", "ours"), MOVED, ids=[",".join(parameters) for parameters, _ in MOVED])
def test_a_parameter_is_the_key_that_means_the_same(parameters: dict[str, Any], ours: dict[str, Any]) -> None:
    config = load_config({"smp": parameters})
    assert without_smp(config) == without_smp(load_config(ours))
    noted = {note.path for note in config.notes if note.message.startswith("read as ")}
    assert noted == {f"smp.{key}" for key in parameters}
    again = load_config(config.raw)
    assert again == config
    assert load_config(config.resolved()) == config


@pytest.mark.parametrize("parameters", ASKS_FOR_NOTHING, ids=lambda parameters: next(iter(parameters)))
def test_a_parameter_that_asks_for_nothing(parameters: dict[str, Any]) -> None:
    assert without_smp(load_config({"smp": parameters})) == without_smp(load_config({}))


@pytest.mark.parametrize("key", [*SHARDED_NUMBERS, "sdp_hierarchical_allgather", "sdp_gradient_clipping"])
def test_the_settings_of_sharding_count_with_sharding_only(key: str) -> None:
    config = load_config({"smp": {key: 1}})
    assert without_smp(config) == without_smp(load_config({}))
    (note,) = (note for note in config.notes if note.path == f"smp.{key}")
    assert "without sharded_data_parallel_degree above 1" in note.message


def test_every_parameter_is_moved_noted_or_checked() -> None:
    """None is accepted in silence: what is neither moved nor noted always is read by the plan's rule."""
    moved = {key for parameters, _ in MOVED for key in parameters}
    noted = {path.removeprefix("smp.") for path in WITHOUT_EFFECT}
    assert set(SmpSection.model_fields) - moved - noted == {"horovod", "ddp", "prescaled_batch", "active_microbatches"}
    assert not moved & noted
    assert {*NUMBERS, *SHARDED_NUMBERS, *SWITCHES} <= moved


@pytest.mark.parametrize(
    ("parameters", "path", "words"),
    [
        ({"auto_partition": False}, "smp.auto_partition", "smp.partition contexts"),
        ({"tensor_parallel_degree": 0}, "smp.tensor_parallel_degree", ">= 1"),
        ({"tensor_parallel_degree": "two"}, "smp.tensor_parallel_degree", "two"),
        ({"placement_strategy": "DDT"}, "smp.placement_strategy", "DPT"),
        ({"memory_weight": 1.5}, "smp.memory_weight", "1.5"),
        ({"fp16": "maybe"}, "smp.fp16", "true or false"),
        ({"tensor_paralel_degree": 2}, "smp.tensor_paralel_degree", "tensor_parallel_degree"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "smp.partitions", "smp.pipeline_parallel_degree is 4"),
        ({"sharded_data_parallel_degree": 2, "partitions": 2}, "smp.sharded_data_parallel_degree", "smp.partitions"),
        (
            {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
            "smp.sharded_data_parallel_degree",
            "smp.shard_optimizer_state is 1",
        ),
        ({"hybrid_shard_degree": 3, "context_parallel_degree": 2}, "smp.hybrid_shard_degree", "multiple of 2"),
    ],
)
def test_what_is_refused(parameters: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"smp": parameters})
    (problem,) = caught.value.problems
    assert problem.path == path
    assert words in problem.render()


CONFLICTS = [
    ({"tensor_parallel_degree": 2}, {"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size is 4"),
    ({"pipeline_parallel_degree": 2}, {"pipeline": {"stages": 4}}, "pipeline.stages is 4"),
    ({"microbatches": 2}, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4"),
    ({"shard_optimizer_state": True}, {"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0"),
    ({"fp16": True}, {"fp16": {"enabled": False}}, "fp16.enabled is false"),
    ({"placement_strategy": "cluster"}, {"parallel": {"placement": "PDT"}}, 'parallel.placement is "PDT"'),
]


@pytest.mark.parametrize(("parameters", "ours", "words"), CONFLICTS, ids=[next(iter(case[0])) for case in CONFLICTS])
def test_a_contradiction_names_both_keys_with_their_lines(
    tmp_path: Path, parameters: dict[str, Any], ours: dict[str, Any], words: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"smp": parameters, **ours}, indent=1))
    (problem,) = examine(file).problems
    assert problem.path == f"smp.{next(iter(parameters))}"
    assert words in problem.message
    assert problem.line == 3
    assert f"on line {7 if isinstance(next(iter(ours.values())), dict) else 5}" in problem.message.replace(" 6", " 7")


def test_keys_that_agree_stand_beside_each_other() -> None:
    config = load_config({"smp": {"tensor_parallel_degree": 2, "shard_optimizer_state": True}, "tensor_parallel": 2})
    assert config.tensor_parallel is not None
    assert config.tensor_parallel.size == 2
    stage = load_config({"smp": {"shard_optimizer_state": True}, "zero_optimization": {"stage": 2}})
    assert stage.zero_optimization.stage == 2


def test_set_changes_a_parameter_of_the_file() -> None:
    source = {"smp": {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 4}}
    config = load_config(source, overrides=["smp.tensor_parallel_degree=4", "smp.sdp_gradient_clipping=0.5"])
    assert config.tensor_parallel is not None
    assert config.tensor_parallel.size == 4
    assert config.gradient_clipping == 0.5
    (problem,) = examine(source, overrides=["tensor_parallel.size=8", "smp.tensor_parallel_degree=4"]).problems
    assert "tensor_parallel.size is 8" in problem.message


def test_messages_speak_of_the_parameter() -> None:
    config = load_config({"smp": {"tensor_parallel_degree": 2}})
    assert config.origin("tensor_parallel.size") == "user"
    assert config.spelled("tensor_parallel.size") == "smp.tensor_parallel_degree"
