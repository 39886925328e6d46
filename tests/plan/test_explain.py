"""`explain`: every key has a sentence with the numbers of the run, and what has no effect is said with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.config import Config, ConfigError
from engine.config.sections import argument_meanings
from engine.config.sections.arguments import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from engine.config.sections.base import Section
from engine.plan import explain
from engine.plan.explain import Explained, Explanation
from engine.plan.inert import HERE
from engine.plan.optimizer_table import OPTIMIZERS
from engine.plan.schedule_table import OURS, TORCH
from engine.plan.sentences import SAY_WHY, SENTENCES
from engine.plan.subjects import DEFAULTS_THAT_MATTER, ELSEWHERE, SUBJECTS, TOP_LEVEL
from tests.unit.test_config_keys import all_keys

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples/gpt_text/config.json")
CORPUS = next((up / "shared/corpus" for up in ROOT.parents[:2] if (up / "shared/corpus").is_dir()), ROOT / "none")
BATCH = {"train_micro_batch_size_per_gpu": 2}
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


def keys(config: dict[str, Any], world: int = 1) -> dict[str, Explanation]:
    return {key.key: key for key in explain({**BATCH, **config}, world).keys}


def every_section() -> dict[str, Any]:
    """A config in which every section is there; what stands in lists and dictionaries, once."""
    tree: dict[str, Any] = {}
    for path in all_keys(Config):
        node: Any = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
    metrics = {"curriculum_metrics": {"seqlen": {}}}
    tree["data_efficiency"]["data_sampling"]["curriculum_learning"] = metrics
    for technique in tree["compression_training"].values():
        if "different_groups" in technique:
            technique["different_groups"] = {"seqlen": technique["different_groups"]}
    tree["tensor_parallel"]["partition_config"]["layer_specs"] = [{}]
    tree["zero_optimization"]["offload_param"] = {"device": "none"}
    for section in ("optimizer", "scheduler"):
        tree.pop(section, None)
    return {**tree, **BATCH}


def names(path: str) -> tuple[str, ...]:
    """A path without the names that users give: the items of dictionaries and lists."""
    return tuple(part.partition("[")[0] for part in path.split(".") if part != "seqlen")


def test_every_key_of_every_section_has_a_sentence() -> None:
    explained = explain(every_section(), lenient=True)
    told = {names(key.key): key for key in explained.keys}
    leaves = {path for path in all_keys(Config) if path[0] not in ("optimizer", "scheduler")}
    parents = {path[:end] for path in leaves for end in range(1, len(path))}
    assert not {path for path in leaves - parents if path not in told}
    for key in explained.keys:
        assert key.meaning.endswith((".", "!", "?", ".)")), key
        first = key.meaning.split(" ")[0]
        assert not first[0].islower() or first.endswith((":", ",")), key
        assert key.status == "acts" or key.reason, key


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_every_argument_has_a_sentence(section: str) -> None:
    known = OPTIMIZER_PARAMS if section == "optimizer" else SCHEDULER_PARAMS
    names = {argument for arguments in known.values() for argument in arguments}
    if section == "optimizer":
        names |= {argument for spec in OPTIMIZERS.values() for argument in (*spec.defaults, *spec.consumed)}
    else:
        names |= {argument for spec in (*OURS.values(), *TORCH.values()) for argument in spec.names}
    assert not {name for name in names if argument_meanings.meaning(section, name) == argument_meanings.OWN_CLASS}


def test_every_top_level_key_has_a_subject_and_no_table_names_a_key_that_is_gone() -> None:
    assert TOP_LEVEL.keys() == Config.model_fields.keys()
    assert set(TOP_LEVEL.values()) | set(ELSEWHERE.values()) <= SUBJECTS.keys()
    known = {".".join(path) for path in all_keys(Config)}
    tables = {*SENTENCES, *HERE, *SAY_WHY, *DEFAULTS_THAT_MATTER, *ELSEWHERE}
    assert not {path for path in tables - known if ".params." not in path}


def test_a_description_is_a_sentence() -> None:
    """What stands in for a sentence of its own must be one."""

    def sections(base: type[Section]) -> Any:
        for section in base.__subclasses__():
            yield section
            yield from sections(section)

    for section in sections(Section):
        for name, info in section.model_fields.items():
            assert info.description, f"{section.__name__}.{name}"
            assert info.description.endswith((".", ".)")), f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("config", "world", "path", "words"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
            2,
            "train_batch_size",
            "8 samples x 4 micro-batches x 2 ranks = 64 samples per optimizer step.",
        ),
        (
            {"model": {"target": "m.py:M"}, "data": {"sequence_length": 100}},
            3,
            "train_batch_size",
            "2 sequences x 1 micro-batch x 3 ranks = 6 samples (600 tokens) per optimizer step.",
        ),
        ({"gradient_accumulation_steps": 4}, 1, "gradient_accumulation_steps", "gradients of 4 micro-batches"),
        ({"bf16": {"enabled": True}}, 1, "data_types.param_dtype", "run in bf16; the optimizer updates fp32 masters"),
        ({"fp16": {"enabled": True}}, 1, "fp16.loss_scale", "starts at 65,536, doubles after 1000 steps"),
        ({"fp16": {"enabled": True}}, 1, "fp16.loss_scale", "halves at the second overflow, never below 1."),
        ({"zero_optimization": {"stage": 3}, "optimizer": ADAM}, 4, "zero_optimization.stage", "keeps 4 bytes per"),
        ({"zero_optimization": {"stage": 1}}, 1, "zero_optimization.stage", "with one rank that divides nothing"),
        ({"optimizer": ADAM}, 1, "optimizer.params.weight_decay", "shrinks every weight by 0.01 x 0.1 = 0.1%."),
        ({"optimizer": ADAM}, 1, "optimizer.params.lr", "Every update uses 0.01: there is no schedule."),
        ({"gradient_clipping": 0}, 1, "gradient_clipping", "Off: gradients are used as large as they are."),
        (
            {"optimizer": ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
            1,
            "scheduler.type",
            "rises from 0 to 0.01 over 7 updates, along a logarithm, and stays there.",
        ),
        (
            {"scheduler": {"type": "LRRangeTest"}},
            1,
            "scheduler.type",
            "From 0.001 it grows by 1 x 0.001 every 2000 updates, without end.",
        ),
        (
            {"model": {"target": "m.py:M"}, "training": {"steps": 100, "save_interval": 40}},
            1,
            "training.save_interval",
            "A checkpoint is written after 40, 80 and 100 steps.",
        ),
        ({"model": {"target": "m.py:M"}}, 1, "model.target", "M, in m.py beside the config, builds the model."),
        ({"wandb": {"enabled": True, "project": "p"}}, 1, "wandb.enabled", 'Rank 0 logs to the project "p".'),
    ],
)
def test_sentences_have_the_numbers_of_the_run(config: dict[str, Any], world: int, path: str, words: str) -> None:
    key = keys(config, world)[path]
    assert key.status == "acts"
    assert words in key.meaning


@pytest.mark.parametrize(
    ("config", "world", "path", "words"),
    [
        ({"zero_optimization": {"stage": 2, "offload_param": {"pin_memory": False}}}, 2,
         "zero_optimization.offload_param.pin_memory", "it acts at stage 3 only, and the stage is 2"),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 9}}, 2,
         "zero_optimization.reduce_bucket_size", "at stage 3 a group of blocks is reduced together"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 9}}, 1,
         "zero_optimization.reduce_bucket_size", "one data-parallel rank"),
        ({"zero_optimization": {"overlap_comm": False}}, 2, "zero_optimization.overlap_comm", "always overlaps"),
        ({"fp16": {"initial_scale_power": 3}}, 1, "fp16.initial_scale_power", "fp16 is off: enabled is false"),
        ({"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 3}}, 1, "fp16.hysteresis", "fixed at 8"),
        ({"optimizer": ADAM, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}}, 1,
         "optimizer.params.lr", "WarmupDecayLR sets the learning rate itself, by warmup_max_lr 0.001"),
        ({"training": {"steps": 5, "save_interval": 9}, "model": {"target": "a:b"}}, 1,
         "training.save_interval", "training ends after 5 steps"),
        ({"training": {"steps": 5, "num_epochs": 9}}, 1, "training.num_epochs", "training.steps is given"),
        ({"data": {"sequence_length": 5}}, 1, "data.sequence_length", "no model"),
        ({"sparse_gradients": True}, 1, "sparse_gradients", "reduced dense"),
        ({"aio": {"queue_depth": 9}}, 1, "aio.queue_depth", "nothing is offloaded to disk"),
        ({"flops_profiler": {"profile_step": 9}}, 1, "flops_profiler.profile_step", "flops_profiler is off"),
        ({"gradient_allreduce_op": "sum", "prescale_gradients": True}, 2, "prescale_gradients", "divides nothing"),
        ({"checkpoint": {"load_universal": True}}, 1, "checkpoint.load_universal", "every checkpoint here loads"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said_with_the_reason(config: dict[str, Any], world: int, path: str, words: str) -> None:
    explained = explain({**BATCH, **config}, world)
    (key,) = [key for key in explained.keys if key.key == path]
    assert key.status == "inert"
    assert words in key.reason
    text = explained.render(100)
    assert path in text.partition("Not used here")[2]


def test_a_value_that_asks_for_what_happens_anyway_is_not_called_inert() -> None:
    key = keys({"zero_optimization": {"contiguous_gradients": True}}, 2)["zero_optimization.contiguous_gradients"]
    assert (key.status, key.reason) == ("as-always", "gradients always lie in contiguous buckets")


def test_a_long_warm_up_is_remarked_on() -> None:
    config = {
        "training": {"steps": 10}, "optimizer": ADAM, "scheduler": {"type": "WarmupLR"}, "model": {"target": "a:b"},
    }  # fmt: skip
    found = keys(config)
    assert "the warm-up of 1000 steps is never over" in found["scheduler.params.warmup_num_steps"].remark
    assert "training ends after 10" in found["scheduler.type"].meaning


def test_conflicts_needs_and_what_is_not_built_stand_at_their_keys() -> None:
    config = {
        "train_batch_size": 7, "bf16": {"enabled": True}, "fp16": {"enabled": True}, "amp": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "seed": "many", "autotuning": {"enabled": True},
    }  # fmt: skip
    explained = explain(config, 2)
    found = {key.key: key for key in explained.keys}
    assert found["train_batch_size"].status == "conflict"
    assert "7 = 3 x 2 + 1" in found["train_batch_size"].reason
    assert (found["seed"].status, found["seed"].value) == ("conflict", "many")
    assert (found["optimizer.params.lr"].status, found["optimizer.params.lr"].value) == ("needs-value", "auto")
    assert found["amp.enabled"].status == "conflict"
    assert found["autotuning.enabled"].status == "not-built"
    assert explained.verdict.exit_code == 2
    text = explained.render(100)
    assert "PROBLEM" in text
    assert "NEEDS A VALUE" in text
    assert "NOT BUILT HERE" in text
    assert f"{len(explained.verdict.problems)} problems" in text


def test_where_values_come_from(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"train_batch_size": 8,\n"bfloat16": {"enabled": true},\n"zero_optimization": {"stage": 3,\n'
        '"stage3_prefetch_bucket_size": 100},\n"scheduler": {"type": "WarmupDecayLR", "params": '
        '{"total_num_steps": "auto"}}, "training": {"steps": 9}, "optimizer": {"type": "Adam", "params": '
        '{"lr": "auto"}}}'
    )
    explained = explain(str(file), 2, overrides=["seed=3"], auto={"optimizer.params.lr": 0.5})
    found = {key.key: key for key in explained.keys}
    origins = {path: (found[path].origin, found[path].source) for path in found}
    assert origins["train_batch_size"] == ("user", "line 1")
    assert origins["train_micro_batch_size_per_gpu"] == ("derived", "derived")
    assert origins["seed"] == ("user", "--set")
    assert origins["gradient_clipping"] == ("default", "default")
    assert origins["optimizer.params.lr"][0] == "auto"
    assert origins["scheduler.params.total_num_steps"][0] == "auto"
    assert (found["scheduler.params.total_num_steps"].value, found["scheduler.params.total_num_steps"].because) == (
        9,
        "training.steps",
    )
    assert found["bf16.enabled"].path == "bfloat16.enabled"
    assert found["zero_optimization.prefetch_bucket_size"].path == "zero_optimization.stage3_prefetch_bucket_size"


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("everything", [False, True])
def test_lines_fit(columns: int, everything: bool) -> None:
    lines = explain(EXAMPLE, 2).render(columns, everything).splitlines()
    heads = {line for line in lines if line.startswith("  ") and not line.startswith("   ")}
    assert max(len(line) for line in lines if line not in heads) <= columns
    assert max(map(len, lines)) <= columns + 50


def test_the_example_reads_well() -> None:
    text = explain(EXAMPLE, 2).render(100)
    assert "This run trains GPT of model.py for 360 updates of 16 samples (2,048 tokens) each." in " ".join(
        text.split()
    )
    headings = [line for line in text.splitlines() if line in SUBJECTS.values()]
    assert headings == [SUBJECTS[name] for name in SUBJECTS if SUBJECTS[name] in headings]
    assert {"Batch and length", "Precision", "Optimizer", "Learning rate", "Checkpoints"} <= set(headings)
    assert "No effect" not in text
    assert len(text.splitlines()) < 110


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", EXAMPLE, "--world", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"file", "world", "summary", "keys", "verdict", "problems", "notes"} <= told.keys()
    assert len(told["keys"]) > 300
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BATCH, "zero_optimisation": {"stage": 1}}))
    assert main(["explain", str(file)]) == 2
    out = capsys.readouterr().out
    assert "did you mean zero_optimization?" in " ".join(out.split())  # lines break where paths are long
    file.write_text("{")
    assert main(["explain", str(file)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "ptrain: 1 problem in " in captured.err


def test_it_loads_no_torch() -> None:
    code = (
        f"import sys; from engine.plan import explain; explain({EXAMPLE!r}, 2).render(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_whole_configs_can_be_explained() -> None:
    """The examples', and those of the corpus where there is one beside this checkout."""
    told = {False: 0, True: 0}
    examples = sorted((ROOT / "examples").glob("*/*.json"))
    corpus = sorted(CORPUS.rglob("*.json"))
    for file in [*examples, *corpus]:
        try:
            explained: Explained = explain(os.fspath(file), 8)
        except ConfigError:
            assert file not in examples
            continue
        told[file in examples] += 1
        assert explained.render(80)
        json.dumps(explained.to_json())
    assert told[True] == len(examples) > 0
    assert told[False] > 50 or not corpus
