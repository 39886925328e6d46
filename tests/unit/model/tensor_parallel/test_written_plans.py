"""Plans that somebody wrote: patterns in the JSON, DeepSpeed's layer specs, and what transformers' models carry."""

from __future__ import annotations

import pytest
from torch import nn

from engine.config import load_config
from engine.config.messages import ConfigError, EngineError
from engine.model.tensor_parallel.json_plan import read_layer_specs, read_plan
from engine.model.tensor_parallel.model_plan import own_plan, read_model_plan
from engine.model.tensor_parallel.split import Split


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(3))
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.lm_head = nn.Linear(8, 32, bias=False)


def nowhere(path):
    return None, None, None


def problems(plan, **section):
    with pytest.raises(ConfigError) as caught:
        read_plan(Model(), plan, nowhere)
    return [problem.render() for problem in caught.value.problems]


def test_patterns_name_modules_and_the_rest_stays_whole():
    plan = {"*.q_proj": "column", "layers.*.o_proj": "row", "embed": "vocabulary", "lm_head": "vocabulary"}
    written = read_plan(Model(), {**plan, "*.norm": "replicate"}, nowhere)
    assert written.origin == "json"
    assert {name: split.style for name, split in written.splits.items()} == {
        **{f"layers.{index}.q_proj": "column" for index in range(3)},
        **{f"layers.{index}.o_proj": "row" for index in range(3)},
        "embed": "vocabulary",
        "lm_head": "head",
    }


def test_every_mistake_of_a_plan_is_told_at_once():
    found = problems(
        {
            "*.q_prj": "column",
            "*.k_proj": "column",
            "layers.1.*": "row",
            "*.norm": "column",
            "embed": "row",
            "*.nrm": "sequence",
        }
    )
    text = "\n".join(found)
    assert '"*.q_prj" matches no module of Model' in text
    assert '"*.q_proj"' in text
    assert '"*.k_proj" cuts layers.1.k_proj as column, "layers.1.*" as row' in text
    assert '"*.norm" is to be cut as column, and layers.*.norm is a LayerNorm' in text
    assert '"embed" is to be cut as row, and embed is an Embedding 32 x 8, which is cut by its rows' in text
    assert 'cut it as "vocabulary"' in text
    assert '"*.nrm" matches no module' in text
    assert all(line.startswith("tensor_parallel.plan: ") for line in found)


def test_a_plan_fits_a_model_with_and_without_a_module_around_it():
    plan = {"*.layers.*.q_proj": "column", "*.lm_head": "vocabulary"}
    wrapped = nn.Module()
    wrapped.inner = Model()
    assert set(read_plan(wrapped, plan, nowhere).splits) == {
        f"inner.{n}" for n in read_plan(Model(), plan, nowhere).splits
    }


def test_two_patterns_that_agree_are_no_mistake():
    assert len(read_plan(Model(), {"*.q_proj": "column", "layers.0.q_*": "column"}, nowhere).splits) == 3


def test_the_place_in_the_file_is_told(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{\n  "tensor_parallel": {\n    "size": 2,\n    "plan": {"*.nothing": "row"}\n  }\n}')
    config = load_config(file)
    with pytest.raises(ConfigError, match=r"config\.json:4:"):
        read_plan(Model(), config.tensor_parallel.plan, config.locate)


def specs(*layer_specs, **more):
    config = load_config({"tensor_parallel": {"size": 2, "partition_config": {"layer_specs": layer_specs, **more}}})
    return read_layer_specs(Model(), config.tensor_parallel.partition_config, nowhere)


def test_deepspeeds_layer_specs_are_translated():
    written = specs(
        {"patterns": [".*\\.qkv\\.weight"], "partition_type": "column", "shape": [[8, 8, 8], -1], "partition_dim": 0},
        {"patterns": [".*\\.q_proj", ".*\\.k_proj"], "partition_type": "column", "gather_output": True},
        {"patterns": [".*\\.o_proj"], "partition_type": "row"},
        {"patterns": [".*norm.*"], "partition_type": "skip"},
        {"patterns": [".*"], "partition_type": "skip", "model_types": ["bloom"]},
        {"patterns": ["lm_head"], "partition_type": "column", "gather_output": True},
    )
    layer = "layers.2"
    assert written.splits[f"{layer}.qkv"] == Split("column", segments=(8, 8, 8))
    assert written.splits[f"{layer}.k_proj"] == Split("column", gather_output=True)
    assert written.splits[f"{layer}.o_proj"] == Split("row")
    assert len(written.splits) == 3 * 4 + 1
    assert any("bloom" in note for note in written.notes)


def test_the_first_spec_counts_as_in_deepspeed():
    written = specs(
        {"patterns": [".*\\.q_proj"], "partition_type": "skip"}, {"patterns": [".*_proj"], "partition_type": "column"}
    )
    assert {name.rpartition(".")[2] for name in written.splits} == {"k_proj", "o_proj"}
    assert any("the first counts" in note for note in written.notes)


@pytest.mark.parametrize(
    ("spec", "clause"),
    [
        ({"patterns": [".*\\.q_prj$"]}, "match no parameter"),
        ({"patterns": [".*\\.qkv"], "shape": [5, -1]}, "24 outputs, which shape [5, -1] does not divide"),
        ({"patterns": [".*\\.qkv"], "shape": [4, -1, 8], "partition_dim": 1}, "has no meaning for a matrix"),
        ({"patterns": [".*\\.norm"]}, "is a LayerNorm"),
        ({"patterns": ["embed"], "partition_type": "row"}, "is cut by its rows"),
    ],
)
def test_layer_specs_without_a_meaning_are_refused(spec, clause):
    with pytest.raises(ConfigError) as caught:
        specs(spec)
    assert clause in str(caught.value)


def test_strict_mode_wants_every_linear_layer_named():
    with pytest.raises(ConfigError, match=r"no spec matches .*layers\.\*\.k_proj"):
        specs({"patterns": [".*\\.q_proj"]}, strict_mode=True)


def test_a_models_own_styles_are_translated():
    plan = {
        "layers.*.q_proj": "colwise",
        "layers.*.k_proj": "colwise_gather_output",
        "layers.*.o_proj": "rowwise_split_input",
        "layers.*.norm": "replicated_with_grad_allreduce",
        "embed": "embedding_rowwise",
        "lm_head": "colwise_rep",
        "layers.*.absent": "colwise",
    }
    written = read_model_plan(Model(), plan)
    assert written.splits["layers.1.q_proj"] == Split("column")
    assert written.splits["layers.1.k_proj"] == Split("column", gather_output=True)
    assert written.splits["layers.1.o_proj"] == Split("row", split_input=True)
    assert written.splits["embed"] == Split("vocabulary")
    assert len(written.splits) == 3 * 3 + 2
    assert "layers.*.absent" in written.notes[0]


def test_styles_without_a_meaning_are_refused_by_name():
    with pytest.raises(EngineError) as caught:
        read_model_plan(Model(), {"layers.*.q_proj": "local", "layers.*.k_proj": "diagonal", "embed": "colwise"})
    for clause in ("layers.*.q_proj: 'local'", "layers.*.k_proj: the style 'diagonal'", "embed: embed is an Embedding"):
        assert clause in str(caught.value)


def test_an_older_models_plan_stands_in_its_config():
    class Base(nn.Module):
        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.config = type("Config", (), {"base_model_tp_plan": {"layers.*.q_proj": "colwise"}})()

    outer = nn.Module()
    outer.wrapped = Base()
    assert own_plan(Base()) == {"model.layers.*.q_proj": "colwise"}
    assert own_plan(outer) == {"wrapped.model.layers.*.q_proj": "colwise"}
    assert own_plan(Model()) == {}
