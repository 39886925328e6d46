"""What stages hold, and models that cannot be cut so: told in the plan with the arithmetic and what would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from engine.cli.main import main
from engine.config import load_config
from engine.config.messages import EngineError
from engine.data.batch import loss_of as scalar_of
from engine.model.describe import describe_model
from engine.plan import ModelFacts, Plan, World, plan
from engine.plan.facts import ParameterFacts
from engine.plan.forecast import forecast
from engine.plan.stages import stages_of
from tests.parity.pipeline_models import batch_of, cross_entropy, seeded

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipeline_gpt" / "config.json"


def planned(world: int = 4, **pipeline: Any) -> Plan:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "pipeline": pipeline}
    return plan(load_config({**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}), World(world, world))


def facts_of(*sizes: int, before: int = 0, after: int = 0) -> ModelFacts:
    blocks = tuple(f"h.{index}" for index in range(len(sizes)))
    parameters = [ParameterFacts(f"{blocks[at]}.w", (size,), block=at) for at, size in enumerate(sizes) if size]
    ends = [ParameterFacts("embed.w", (before,))] if before else []
    return ModelFacts.of([*ends, *parameters, *([ParameterFacts("head.w", (after,))] if after else [])], blocks)


def refusal(made: Plan, facts: ModelFacts) -> str:
    with pytest.raises(EngineError) as raised:
        forecast(made, facts)
    return str(raised.value)


def test_more_stages_than_layers() -> None:
    told = refusal(planned(8, stages=8), facts_of(10, 10, 10, 10, 10, 10))
    assert "8 stages need 8 layers, and the model has 6 layers" in told
    assert "(allowed: 1, 2, 4); set pipeline.stages to 4" in told
    told = refusal(planned(stages=4, schedule="interleaved_1f1b", virtual_stages=3), facts_of(*[10] * 8))
    assert "12 stages (4 ranks x pipeline.virtual_stages 3) need 12 layers, and the model has 8 layers" in told
    assert "set pipeline.stages to 2, or set pipeline.virtual_stages to 2" in told
    told = refusal(planned(stages=4, schedule="zbv"), facts_of(*[10] * 7))
    assert "8 stages (4 ranks x pipeline.virtual_stages 2) need 8 layers" in told


def test_a_stage_without_parameters() -> None:
    told = refusal(planned(stages=4, partition="uniform"), facts_of(10, 0, 10, 10))
    assert "stage 1 of 4 would hold h.1 and nothing to train; 3 of the 4 layers have trainable parameters" in told


def test_counts_that_do_not_add_up() -> None:
    told = refusal(planned(2, stages=2, partition=[1, 2]), facts_of(1, 1, 1, 1))
    assert "[1, 2] deals out 3 layers" in told
    assert "[2, 2] would fit" in told


def test_what_a_rank_holds_follows_the_partition_and_the_schedule() -> None:
    facts = facts_of(1, 2, 4, 8, 16, 32, 64, 128, before=1000, after=500)
    stages = stages_of(planned(stages=4, schedule="zbv", partition="uniform"), facts)
    assert stages.on(0) == [0, 7]
    assert [p.name for p in stages.held_by(0)] == ["embed.w", "h.0.w", "h.7.w", "head.w"]
    assert [p.name for p in stages.held_by(2)] == ["h.2.w", "h.5.w"]
    assert [stages.parameters_of(stage) for stage in range(8)] == [1001, 2, 4, 8, 16, 32, 64, 628]


def described(name: str, made: Plan) -> ModelFacts:
    def loss_of(model: nn.Module) -> Tensor:
        batch = batch_of(name, 0, 0, 4)
        loss = scalar_of(model(**batch)) if isinstance(batch, dict) else cross_entropy(model(batch[0]), batch[1])
        assert isinstance(loss, Tensor)
        return loss

    return describe_model(lambda: seeded(name), made, loss_of, 8)


def test_a_model_that_reads_past_the_cut_is_refused_by_name() -> None:
    made = planned(2, stages=2)
    told = refusal(made, described("skip", made))
    assert "the model cannot be cut between blocks.1 and blocks.2: what stands behind reads" in told
    assert "give the model as engine.PipelineModule" in told


@pytest.mark.parametrize("name", ["tied_layers", "tuples", "sequential", "dropout", "gpt2"])
def test_models_that_hand_everything_on_can_be_cut(name: str) -> None:
    made = planned(2, stages=2, partition="uniform")
    facts = described(name, made)
    assert facts.uncuttable == ()
    pipeline = forecast(made, facts).pipeline
    assert pipeline is not None
    assert pipeline.is_measured or name == "tuples"


def test_times_stand_for_the_layers_weight() -> None:
    even = facts_of(10, 10, 10, 10)
    slow_end = ModelFacts(**{**vars(even), "layer_times": (0, 1, 1, 1, 1, 3)})
    assert stages_of(planned(2, stages=2, partition="time"), slow_end).bounds == (0, 3, 4)
    assert stages_of(planned(2, stages=2, partition="time"), even).bounds == (0, 2, 4)


# --- the command ---------------------------------------------------------------------------------------------


def test_the_command_shows_stages_and_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    arguments = ["plan", str(EXAMPLE), "--world", "4", "--set", "pipeline.schedule=zero_bubble"]
    assert main([*arguments, "--speed", "1T", "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "blocks.0 to blocks.3" in text
    assert "Memory of every pipeline rank" in text
    assert "I backward of inputs, W backward of weights" in text
    assert "Forwards and backwards of a step take" in text
    drawn = picture.read_text()
    for name in ("forward", "backward of inputs", "backward of weights", "idle", "rank 1", "stage 1"):
        assert f">{name}</text>" in drawn, name
    assert drawn.count("<rect") > 2 * 8 * 3
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["pipeline"]
    assert [stage["layers"] for stage in told["stages"]] == [[0, 4], [4, 8]]
    assert [rank["pipeline_rank"] for rank in told["ranks"]] == [0, 1]
    assert told["bubble"] == pytest.approx(1 / 25)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "pipeline.stages=16", "--world", "16"], "16 stages need 16 layers, and the model has 8 layers"),
        (["--set", "pipeline.schedule=interleaved_1f1b"], "needs at least 2: with 1 it is 1f1b"),
        (["--set", "pipeline.partition=[7,2]"], "[7, 2] deals out 9 layers"),
        (["--svg", "picture.png"], "picture.png is no SVG"),
        (["--svg", "picture.svg", "--set", "pipeline.stages=1"], "--svg draws the schedule of a pipeline"),
    ],
)
def test_bad_input_is_told_before_any_rank_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(EXAMPLE), "--world", "4", "--set", "train_batch_size=64", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
