"""How layers are split is found by the engine, proved before training, and trains as one process does; what cannot be
proved is refused, on all ranks alike."""

from __future__ import annotations

import functools

import pytest

from engine.model.tensor_parallel.split import Split
from tests.parity.compare import LOSSES, NORMS, PARAMETERS
from tests.parity.runs import config_of
from tests.parity.toy import Result, reference_run
from tests.parity.unplanned_models import look, train_unplanned, unplanned

STEPS = 3
CLIP = 0.5


@functools.cache
def reference(name: str) -> Result:
    return reference_run(model=unplanned(name), steps=STEPS, clip=CLIP)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[] if tp == 2 or name in ("llama", "gpt2") else pytest.mark.slow)
        for name in ("example", "odd", "gpt2", "llama", "qwen2", "qwen3", "bert")
        for tp in (2, 4)
    ],
)
def test_a_model_without_a_plan_trains_as_one_process_does(ranks, name, tp):
    config = config_of(stage=0, clip=CLIP, tensor_parallel={"size": tp})
    by_rank = ranks(tp).run(train_unplanned, name, config, STEPS, timeout=300)
    expected = reference(name)
    for result, parameters in by_rank:
        assert result.losses == pytest.approx(expected.losses, rel=0, abs=LOSSES)
        assert result.norms == pytest.approx(expected.norms, rel=NORMS)
        for key, value in expected.parameters.items():
            difference = (parameters[key] - value).abs().max().item()
            assert difference <= PARAMETERS, f"{key} is off by {difference:.2e}"


def found(ranks, *arguments, tp=2, **keywords):
    """What all ranks found, which is the same."""
    first, *others = ranks(tp).run(look, *arguments, tp, timeout=300, **keywords)
    assert all(other == first for other in others)
    assert "refused" not in first, first["refused"]
    return first


def refused(ranks, *arguments, tp=2, **keywords):
    """With what message all ranks refused."""
    first, *others = ranks(tp).run(look, *arguments, tp, timeout=300, **keywords)
    assert all(other == first for other in others)
    assert "refused" in first, first["lines"]
    return first["refused"]


def test_the_example_is_read_from_its_data_flow(ranks):
    plan = found(ranks, "example", {})
    assert plan["origin"] == "inferred"
    assert plan["splits"]["blocks.3.attention_in"] == Split("column", segments=(64, 64, 64))
    assert plan["splits"]["blocks.0.mlp_in"] == Split("column")
    assert plan["splits"]["blocks.0.attention_out"] == plan["splits"]["blocks.0.mlp_out"] == Split("row")
    assert plan["splits"]["token_embedding"] == Split("vocabulary")
    assert plan["splits"]["head"].style == "head"
    assert plan["attributes"] == {f"blocks.{index}.num_heads": 2 for index in range(4)}
    assert len(plan["splits"]) == 4 * 4 + 2
    assert "4 x blocks.*: attention: attention_in (64 + 64 + 64) by columns; attention_out by rows" in plan["lines"]
    assert "4 x blocks.*: numbers that the code reads: num_heads 4 -> 2" in plan["lines"]


def test_transposed_fused_weights_and_the_width_that_gpt2_splits_by(ranks):
    plan = found(ranks, "gpt2", {})
    block = "inner.transformer.h.1"
    assert plan["splits"][f"{block}.attn.c_attn"] == Split("column", segments=(64, 64, 64), transposed=True)
    assert plan["splits"][f"{block}.attn.c_proj"] == Split("row", transposed=True)
    assert plan["attributes"][f"{block}.attn.split_size"] == 32
    assert any("129 a rank and 128 on the last" in line for line in plan["lines"])


def test_a_models_own_plan_comes_before_inference_also_inside_a_wrapper(ranks):
    plan = found(ranks, "qwen3", {}, tp=4)
    assert plan["origin"] == "model"
    assert plan["summed"] == tuple(
        f"inner.model.layers.{layer}.self_attn.{norm}_norm" for layer in range(2) for norm in "qk"
    )


def test_names_do_not_matter(ranks):
    plan = found(ranks, "odd", {})
    columns = {name[-1] for name, split in plan["splits"].items() if split.style == "column"}
    rows = {name[-1] for name, split in plan["splits"].items() if split.style == "row"}
    assert (columns, rows) == ({"a", "b", "d", "e", "f"}, {"c", "g"})
    assert plan["attributes"] == {"things.0.z": 2, "things.1.z": 2}


def test_blocks_of_equal_shapes_and_other_heads_are_proved_apart(ranks):
    plan = found(ranks, "odd", {}, changes={"z": (4, 8, 4)})
    assert plan["attributes"] == {"things.0.z": 2, "things.1.z": 4, "things.2.z": 2}


@pytest.mark.parametrize("name", ["example", "bert", "llama"])
def test_a_model_without_memory_is_proved_too(ranks, name):
    assert found(ranks, name, {}, device="meta")["splits"] == found(ranks, name, {})["splits"]


def test_the_json_comes_first(ranks):
    plan = found(ranks, "llama", {"plan": {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}})
    assert plan["origin"] == "json"
    assert len(plan["splits"]) == 6
    assert (
        "2 x inner.model.layers.*: whole: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj"
        in (plan["lines"])
    )


def test_heads_that_no_attribute_holds_are_refused_by_name(ranks):
    message = refused(ranks, "odd", {}, changes={"fixed": 4})
    assert "things.*.b, things.*.d, things.*.a, things.*.c does not hold on 2 ranks" in message
    assert "things.0.c (Linear 64 -> 64, row): its output differs by" in message
    assert 'write "tensor_parallel.plan"' in message


LLAMA = {"*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row"}
MLP = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}


@pytest.mark.parametrize(
    ("plan", "clauses"),
    [
        (
            {"*.q_proj": "column", "*.o_proj": "row"},
            ["self_attn.o_proj is cut by rows", "self_attn.k_proj, self_attn.v_proj feed it whole"],
        ),
        ({"*.q_proj": "column"}, ["self_attn.q_proj is cut by columns", "self_attn.o_proj takes it whole"]),
        ({**MLP, "*.down_proj": "column"}, ["mlp.gate_proj is cut by columns", "mlp.down_proj takes it whole"]),
        ({**MLP, "*.up_proj": "row"}, ["mlp.up_proj is cut by rows", "which takes a cut input"]),
        ({"*.down_proj": "row"}, ["mlp.gate_proj, mlp.up_proj feed it whole"]),
    ],
    ids=["only q", "open columns", "column for row", "row for column", "row alone"],
)
def test_wrong_plans_are_caught_before_training(ranks, plan, clauses):
    message = refused(ranks, "llama", {"plan": plan})
    assert "the plan in the config" in message
    assert "tried on inner.model.layers.0:" in message
    for clause in clauses:
        assert clause in message


def test_fused_sizes_that_are_wrong_give_other_numbers(ranks):
    spec = {"patterns": [".*attention_in.*"], "partition_type": "column", "shape": [[32, 96, 64], -1]}
    row = {"patterns": [".*attention_out.weight"], "partition_type": "row"}
    message = refused(ranks, "example", {"partition_config": {"layer_specs": [spec, row]}})
    assert "blocks.0" in message
    assert "differs" in message or "fails" in message
    right = {**spec, "shape": [3, -1]}
    plan = found(ranks, "example", {"partition_config": {"layer_specs": [right, row]}})
    assert plan["splits"]["blocks.0.attention_in"].segments == (64, 64, 64)


def test_numbers_that_do_not_divide_are_told_with_the_nearest(ranks):
    message = refused(
        ranks, "llama", {}, changes={"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}, tp=4
    )
    assert "4 ranks cannot share 6 attention heads: 6 = 1 x 4 + 2" in message
    assert "4 ranks cannot share 2 key-value heads: 2 = 0 x 4 + 2" in message
    assert "set tensor_parallel.size to 2" in message


def test_a_model_with_nothing_to_cut_is_refused(ranks):
    message = refused(ranks, "pointwise", {})
    assert "there is nothing to cut in Pointwise" in message
    assert "it has no linear layers" in message
    message = refused(ranks, "alone", {})
    assert "there is nothing to cut in Sequential" in message
    assert "(Linear 8 -> 8)" in message


def test_experts_are_refused_by_the_name_of_their_style(ranks):
    message = refused(ranks, "mixtral", {})
    assert "mlp.experts: 'moe_tp_experts' cuts the experts of a mixture" in message
    assert found(ranks, "mixtral", {"plan": LLAMA})["origin"] == "json"
