"""What a step takes: the published ZeRO table, the verdict on memory, and the command that prints both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.plan import ModelFacts
from engine.plan.capacity import judge, variant
from engine.plan.facts import Boundary, Crossings, ForwardFacts, Kept, ParameterFacts
from engine.plan.forecast import Forecast, forecast
from engine.plan.imagined_model import imagined_facts
from tests.plan.conftest import MakePlan

PLANNING = Path(__file__).resolve().parents[2] / "examples" / "planning"
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
GB = 10**9


def facts_of_blocks(num_blocks: int = 4, tokens: int = 16) -> ModelFacts:
    """Blocks of 1,000 parameters that keep 3,000 whole and 800 cut bytes, an embedding tied to the head."""
    blocks = tuple(f"h.{index}" for index in range(num_blocks))
    parameters = [ParameterFacts("embed", (20, 10), cut=0, shared=True)]
    for index, name in enumerate(blocks):
        parameters.append(ParameterFacts(f"{name}.column", (60, 10), block=index, cut=0))
        parameters.append(ParameterFacts(f"{name}.row", (10, 30), block=index, cut=1))
        parameters.append(ParameterFacts(f"{name}.norm", (100,), block=index))
    facts = ModelFacts.of(parameters, blocks, [("embed", "head")])
    block = Crossings(1, 600, 400, 100, 200, 2, 400, 2, 400)
    forward = ForwardFacts(
        samples=2,
        sequence_length=tokens,
        before=Kept(100),
        blocks=tuple(Kept(3000, 800) for _ in blocks),
        after=Kept(200, 400),
        entering_bytes=200,
        working_bytes=500,
        forward_flops=1000,
        backward_flops=2000,
        block_forward_flops=900,
        crossings=(Crossings(closing_calls=1, closing_bytes=200), *(block for _ in blocks), Crossings(opening_calls=1)),
        cuts_logits=True,
        boundaries=tuple(Boundary(1, 200, 1, 200) for _ in blocks),
    )
    return ModelFacts(**{**vars(facts), "forward": forward})


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_published_table_of_zero(make_plan: MakePlan, stage: int, gigabytes: float) -> None:
    """7.5 billion parameters, 64 ranks, 16-bit parameters and gradients (Rajbhandari et al., 2020, figure 1)."""
    settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, **ADAM}
    settings["data_types"] = {"grad_accum_dtype": "bf16"}
    made = forecast(make_plan(settings, 64), imagined_facts(7_500_000_000))
    assert made.states.model_states is not None
    assert round(made.states.model_states / GB, 2 if stage == 3 else 1) == gigabytes


def test_fp32_gradients_cost_two_more_bytes_a_parameter(make_plan: MakePlan) -> None:
    made = forecast(make_plan({"bf16": {"enabled": True}, **ADAM}, 64), imagined_facts(7_500_000_000))
    assert made.states.model_states == pytest.approx(18 * 7.5 * GB, rel=1e-6)


def test_an_imagined_model_has_the_size_that_was_asked_for() -> None:
    for size in (1, 999, 125_000_000, 7_500_000_000):
        assert imagined_facts(size).num_parameters == size


def at(make_plan: MakePlan, world: int, **settings: Any) -> Forecast:
    """Of features that may not be built here."""
    base = make_plan({**ADAM, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 1)
    made = variant(base, settings, world)
    assert made is not None
    return forecast(made, facts_of_blocks())


def test_tensor_parallelism_divides_what_its_layers_hold(make_plan: MakePlan) -> None:
    made = at(make_plan, 2, **{"tensor_parallel.size": 2})
    assert made.states.parameters == 4 * (100 + 4 * (300 + 150 + 100))
    assert made.activations is not None
    assert made.activations.kept == 100 + 4 * (3000 + 400) + (200 + 200)
    calls = {(c.axis, c.purpose): c.calls for c in made.collectives}
    assert calls["tp", "activations"] == 3 * (1 + 4 * 2)
    assert calls["tp", "gradients of activations"] == 3 * (1 + 4 * 2)
    assert calls["tp", "loss"] == 3


def test_a_pipeline_holds_a_stage_and_several_micro_batches(make_plan: MakePlan) -> None:
    made = at(make_plan, 2, **{"pipeline.stages": 2})
    assert made.pipeline_rank == 0
    assert made.states.parameters == 4 * (200 + 2 * 1000)
    assert made.activations is not None
    assert made.activations.micro_batches == 2
    assert made.activations.kept == 2 * (100 + 2 * 3800)
    sent = {c.purpose: (c.calls, c.sent_bytes) for c in made.collectives if (c.axis, c.operation) == ("pp", "send")}
    # the tied embedding's gradient goes with a mark that says whether it was touched
    assert sent == {"activations": (3, 3 * 200), "gradients of shared parameters": (1, 4 * (200 + 1))}


@pytest.mark.parametrize(("path", "axis"), [("sequence_parallel_size", "sp"), ("parallel.context_parallel", "cp")])
def test_slices_of_sequences_divide_activations_alone(make_plan: MakePlan, path: str, axis: str) -> None:
    whole, sliced = at(make_plan, 1), at(make_plan, 2, **{path: 2})
    assert sliced.states.parameters == whole.states.parameters
    assert whole.activations is not None
    assert sliced.activations is not None
    assert sliced.activations.kept == pytest.approx(whole.activations.kept / 2, abs=4)
    calls = {(c.axis, c.operation): c.calls for c in sliced.collectives if c.axis == axis}
    # of 4 attentions and 3 micro-batches: two exchanges each way; or keys and values on, on again, and gradients twice
    expected = {"all_to_all": 4 * 3 * 4} if axis == "sp" else {"send": 4 * 3 * 2}
    assert {operation: calls[axis, operation] for operation in expected} == expected
    assert calls[axis, "all_reduce"] == 3


def test_checkpointed_blocks_keep_their_input(make_plan: MakePlan) -> None:
    made = at(make_plan, 1, **{"activation_checkpointing.number_checkpoints": 4})
    assert made.activations is not None
    assert made.activations.kept == 100 + 4 * 200 + 600 + 3800
    assert made.compute.measured == (1000 + 2000 + 900) * 3


def test_every_sample_passes_through_the_model_once(make_plan: MakePlan) -> None:
    made = at(make_plan, 4)
    compute = made.compute
    assert (compute.samples, compute.tokens) == (2 * 3 * 4, 2 * 3 * 4 * 16)
    assert compute.measured == 3000 * 12
    assert compute.model == 6 * 4200 * compute.tokens
    assert compute.hardware == 8 * 4200 * compute.tokens


def test_what_does_not_fit_is_told_with_what_would(make_plan: MakePlan) -> None:
    settings = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 8, **ADAM}
    made = forecast(make_plan(settings, 4), facts_of_blocks())
    low, high = made.low_bytes, made.high_bytes
    assert low is not None
    assert high is not None
    assert judge(made, 2 * high).kind == "fits"
    assert judge(made, low).kind == "does not fit"
    assert judge(made, int((low + high) / 2 / 0.9)).kind == "may fit"
    found = judge(made, low)
    assert found.largest == "activations"
    assert found.options[0].changes["train_micro_batch_size_per_gpu"] == 4
    for option in found.options:
        tried = variant(made.plan, option.changes, option.ranks)
        assert tried is not None
        assert tried.batch.global_batch_size == made.plan.batch.global_batch_size
        again = forecast(tried, made.facts)
        assert again.high_bytes == option.high_bytes
        assert option.high_bytes <= found.usable_bytes


def test_more_ranks_are_proposed_where_nothing_else_is_enough(make_plan: MakePlan) -> None:
    settings = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, **ADAM}
    made = forecast(make_plan(settings, 2), imagined_facts(7_500_000_000))
    found = judge(made, 24 * GB)
    assert found.kind == "does not fit"
    assert found.options
    assert all(option.ranks is not None and option.ranks > 2 for option in found.options)


# --- the command ---------------------------------------------------------------------------------------------


def test_the_command_needs_no_model_for_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(PLANNING / "zero.json"), "--world", "64", "--model-size", "7.5b", "--memory", "80GB"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "= model states   120 GB" in text
    assert "Does not fit in 80 GB" in text
    assert "--set zero_optimization.stage=1" in text
    assert main([*arguments, "--set", "zero_optimization.stage=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert round(told["bytes"]["model_states"] / GB, 1) == 16.6
    assert told["fit"]["verdict"] == "fits"
    assert {call["operation"] for call in told["collectives"]} == {"reduce_scatter", "all_gather", "all_reduce"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "lots", "--model-size", "1b"], "'lots' is not a size of memory, such as 24GB or 80GiB"),
        (["--model-size", "huge"], "'huge' is not a number of parameters"),
        (["--memory", "80GB"], "--memory needs a model: set model.target in the config, or give --model-size"),
        (["--world", "6", "--set", "tensor_parallel.size=4"], "does not divide the ranks of world size 6"),
        (["--set", 'model.target="nowhere.py:Model"'], "there is no file"),
    ],
)
def test_refusals_are_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(PLANNING / "zero.json"), *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_a_model_that_needs_memory_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Linear(int(torch.rand(()).item()) + 1, 1)\n"
    )
    config = {"train_batch_size": 8, "model": {"target": "model.py:build"}, **ADAM}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path / "config.json")]) == 2
    told = capsys.readouterr().err
    assert "building build failed" in told
    assert "--no-model leaves it aside" in told
    assert main(["plan", str(tmp_path / "config.json"), "--no-model"]) == 0


GPT = {
    "target": "../gpt_text/model.py:GPT",
    "args": {"vocabulary_size": 30, "num_blocks": 2, "width": 12, "num_heads": 3, "sequence_length": 8},
}
POINTWISE = """
import torch

class Pointwise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, input_ids, labels):
        return (input_ids[..., None] * self.scale).sum()
"""


def columns_and(**others: str) -> dict[str, Any]:
    return {"size": 3, "plan": {"*.mlp_in": "column", **{f"*.{name}": style for name, style in others.items()}}}


@pytest.mark.parametrize(
    ("changes", "world", "said"),
    [
        ({"tensor_parallel.size": 2}, 3, "does not divide the ranks of world size 3 (--world): 3 = 1 x 2 + 1"),
        ({"tensor_parallel.size": 2}, 3, "start 2 or 4 ranks, or set tensor_parallel.size to 1 or 3"),
        ({"tensor_parallel.size": 2}, 2, "2 ranks cannot share 3 attention heads: 3 = 1 x 2 + 1"),
        ({"tensor_parallel.size": 2}, 2, "set tensor_parallel.size to 1 or 3"),
        ({"sequence_parallel_size": 2}, 2, "2 ranks cannot share the 3 attention heads: 3 = 1 x 2 + 1"),
        ({"sequence_parallel_size": 2}, 2, "set 1 or 3, or use parallel.context_parallel"),
        (
            {"tensor_parallel": columns_and(mlp_inn="row")},
            3,
            '"*.mlp_inn" matches no module of GPT; did you mean "*.mlp_in"',
        ),
        ({"tensor_parallel": columns_and(**{"0.mlp_in": "row"})}, 3, '"*.mlp_in" cuts blocks.0.mlp_in as column'),
        ({"tensor_parallel": columns_and(**{"0.mlp_in": "row"})}, 3, "let one pattern match it"),
        ({"tensor_parallel": {"size": 3, "plan": {"*.mlp_in": "replicate"}}}, 3, "there is nothing to cut in GPT"),
        ({"tensor_parallel.size": 2, "model": "Pointwise"}, 2, "there is nothing to cut in Pointwise"),
        (
            {"sequence_parallel_size": 3},
            3,
            "8 tokens cannot be cut into slices, sequence_parallel_size 3: 8 = 2 x 3 + 2",
        ),
        ({"sequence_parallel_size": 3}, 3, "set 6 or 9"),
        ({"parallel.context_parallel": 3}, 3, "in two chunks a rank: 8 = 1 x 6 + 2"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_arithmetic(
    changes: dict[str, Any], world: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(POINTWISE)
    changes = {"model": GPT, "data.sequence_length": 8, "train_batch_size": 6 * world} | changes
    if changes["model"] == "Pointwise":
        changes["model"] = {"target": f"{tmp_path / 'odd.py'}:Pointwise"}
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in changes.items()]
    assert main(["plan", str(PLANNING / "zero.json"), "--world", str(world), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_nodes_are_crossed_by_the_groups_that_do_not_fit_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(PLANNING / "zero.json"), "--no-model", "--world", "12", "--set", "tensor_parallel.size=3"]
    arguments += ["--set", "train_batch_size=12"]
    assert main([*arguments, "--per-node", "8"]) == 0
    assert "between nodes: 3 of 3 dp_replicate groups, 1 of 4 tp groups" in " ".join(capsys.readouterr().out.split())
    assert main(arguments) == 0
    assert "node" not in capsys.readouterr().out
