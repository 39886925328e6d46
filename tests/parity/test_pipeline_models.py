"""What can be cut into stages, and gives what it gives in one piece: lists of layers, `nn.Sequential`, Hugging Face
decoders; and what a pipeline refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.compat import zero
from tests.parity.pipeline_models import LENGTHS, batch_of, config_of, cross_entropy, seeded, train, train_each
from tests.parity.runs import assemble

TWO = {"pipeline": {"stages": 2}}
VIRTUAL = {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}}
JOBS: list[tuple[str, dict[str, Any]]] = [
    ("tied_layers", TWO),
    ("tied_layers", {"pipeline": {"stages": 2, "schedule": "zero_bubble", "partition": "type:residual"}}),
    ("tied_layers", {**VIRTUAL, "zero_optimization": {"stage": 3}}),
    ("tuples", TWO),
    ("tuples", {"pipeline": {"stages": 2, "schedule": "zbv"}}),
    ("sequential", TWO),
    ("meta", TWO),
    ("llama", TWO),
    ("llama", {"pipeline": {"stages": 2, "schedule": "dualpipev"}}),
    ("gpt2", VIRTUAL),
    ("opt", TWO),
    ("dropout", TWO),
    ("dropout", {"pipeline": {"stages": 2, "schedule": "zbv"}}),
    ("dropout", {"pipeline": {"stages": 2, "schedule": "gpipe", "partition": [1, 3]}}),
]


@pytest.fixture(scope="module")
def seen(ranks):
    return list(zip(*ranks(2).run(train_each, JOBS, timeout=300), strict=True))


@pytest.mark.parametrize("number", [n for n, (name, _) in enumerate(JOBS) if name != "dropout"])
def test_a_model_in_stages_is_the_model(seen, number):
    """Three steps of three sequence lengths."""
    name, by_rank = JOBS[number][0], seen[number]
    assert len(LENGTHS) == 3
    expected = train(name)
    for rank in by_rank:
        assert not isinstance(rank, Exception), rank
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert set(rank["names"]) < set(expected["names"]) | {n for n in rank["names"] if "head" in n or "embed" in n}
        assert rank["whole"].keys() == expected["whole"].keys()
    whole = assemble([rank["pieces"] for rank in by_rank])
    for parameter, value in expected["whole"].items():
        assert torch.allclose(whole[parameter], value, rtol=0, atol=1e-5), parameter
        assert torch.allclose(by_rank[0]["whole"][parameter], value, rtol=0, atol=1e-5), parameter


def test_a_skip_over_layers_is_refused_and_not_computed_wrongly(ranks):
    with pytest.raises(engine.EngineError, match="reads more than the output of the layer before"):
        ranks(2).run(train, "skip", timeout=60, **TWO)


def test_dropout_does_not_depend_on_the_cut_or_the_schedule(seen):
    runs = [by_rank for (name, _), by_rank in zip(JOBS, seen, strict=True) if name == "dropout"]
    losses = [run[0]["losses"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] == pytest.approx(losses[2], abs=1e-6)
    undropped = train("dropout", pipeline={"stages": 1})["losses"]
    assert losses[0] != pytest.approx(undropped, abs=1e-6)


def deepspeed_gathers(model_engine: engine.Engine) -> None:
    with zero.GatheredParameters(list(model_engine.module.parameters())):
        pass


def refuse(folder: Path) -> dict[str, str]:
    """What a rank is told, call by call."""
    said: dict[str, str] = {}

    def note(what: str, call: Any) -> None:
        try:
            call()
        except engine.EngineError as error:
            said[what] = f"{type(error).__name__}: {error}"

    model_engine, *_ = engine.initialize(model=seeded("llama"), config=config_of(4, **TWO))
    batch = batch_of("llama", 0, 0, 4)
    note("forward", lambda: model_engine(**batch))
    note("module", lambda: model_engine.module(**batch))
    note("backward", lambda: model_engine.backward(torch.ones((), requires_grad=True)))
    note("step", model_engine.step)
    note("gathered", lambda: deepspeed_gathers(model_engine))
    note("data", lambda: model_engine.train_batch(iter([batch] * 3)))
    model_engine.train_batch(batch_of("llama", 0, i, 4) for i in range(4))
    model_engine.save_16bit_model(folder, "model.safetensors")
    whole = model_engine.full_parameters()
    if model_engine.mesh.rank == 0:
        torch.save(whole, folder / "whole.pt")
    model_engine.destroy()
    note(
        "layers",
        lambda: engine.initialize(
            model=seeded("llama"), config=config_of(4, pipeline={"stages": 2, "partition": [1, 2]})
        ),
    )
    note("list", lambda: engine.initialize(model=torch.nn.Linear(4, 4), config=config_of(4, **TWO)))
    return said


def test_what_is_refused_and_what_is_written(ranks, tmp_path):
    for said in ranks(2).run(refuse, tmp_path, timeout=120):
        for call in ("forward", "backward", "step", "module", "gathered"):
            assert said[call].startswith("PipelineError"), said
            assert "train_batch()" in said[call] or "full_parameters()" in said[call]
        assert "the data ended in step 1 at micro-batch 4 of 4" in said["data"]
        assert "deals out 3 layers" in said["layers"]
        assert "has no list of repeated blocks" in said["list"]
    from safetensors.torch import load_file

    saved, whole = load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "whole.pt")
    assert saved.keys() >= whole.keys()
    assert all(torch.equal(saved[name], value) for name, value in whole.items())


def overflow() -> dict[str, Any]:
    """fp16 with a scale that overflows on the last stage alone; then one that does not."""
    config = config_of(4, pipeline={"stages": 2}, fp16={"enabled": True, "initial_scale_power": 30, "hysteresis": 1})
    model_engine, *_ = engine.initialize(model=seeded("tied_layers"), config=config)
    before = {name: value.clone() for name, value in model_engine.full_parameters().items()}
    model_engine.train_batch(batch_of("tied_layers", 0, i, 4) for i in range(4))
    after = model_engine.full_parameters()
    report = model_engine.last_report
    assert report is not None
    seen = {
        "applied": report.applied,
        "scale": model_engine.loss_scale,
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "who": report.first_nonfinite,
    }
    model_engine.destroy()
    return seen


def test_a_gradient_that_is_not_finite_on_one_stage_skips_on_all(ranks):
    seen = ranks(2).run(overflow, timeout=120)
    assert seen[0] == seen[1]
    assert (seen[0]["applied"], seen[0]["same"], seen[0]["scale"]) == (False, True, 2.0**29)
    assert seen[0]["who"] is not None


def declared_in_code() -> tuple[list[float], int]:
    """As DeepSpeed scripts do: the stages stand in the module, the JSON knows nothing of them."""
    from engine.compat.pipe import PipeDataParallelTopology
    from tests.parity.pipeline_models import tied_layers

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = tied_layers(topology=PipeDataParallelTopology(num_pp=2, num_dp=1), partition_method="uniform")
    model_engine, *_ = engine.initialize(model=model, config=config_of(4))
    loss = model_engine.train_batch(batch_of("tied_layers", 0, i, 4) for i in range(4)).item()
    stages = model_engine.mesh.degrees["pp"]
    model_engine.destroy()
    return [loss], stages


def test_stages_declared_in_code(ranks):
    expected = train("tied_layers", steps=1)["losses"]
    for losses, stages in ranks(2).run(declared_in_code, timeout=120):
        assert stages == 2
        assert losses == pytest.approx(expected, abs=1e-5)


def test_layers_that_cannot_be():
    from engine import LayerSpec, PipelineModule, TiedLayerSpec

    with pytest.raises(engine.EngineError, match="LayerSpec takes a class"):
        LayerSpec(cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(
        engine.EngineError, match="tied_weight_attr 'bias' is no parameter of Embedding; it has: weight"
    ):
        PipelineModule([TiedLayerSpec("a", torch.nn.Embedding, 3, 2, tied_weight_attr=["weight", "bias"])])
    with pytest.raises(engine.EngineError, match=r"layers\[1\] ties 'a' to a Linear"):
        PipelineModule([TiedLayerSpec("a", torch.nn.Embedding, 3, 2), TiedLayerSpec("a", torch.nn.Linear, 3, 2)])
    with pytest.raises(engine.EngineError, match="put its layers into the outer list"):
        PipelineModule([PipelineModule([torch.tanh])])


def test_seeded_layers_do_not_depend_on_their_neighbours():
    from engine import LayerSpec, PipelineModule

    first = PipelineModule([LayerSpec(torch.nn.Linear, 2, 2), LayerSpec(torch.nn.Linear, 3, 3)], seed_layers=True)
    other = PipelineModule([LayerSpec(torch.nn.Linear, 9, 9), LayerSpec(torch.nn.Linear, 3, 3)], seed_layers=True)
    assert torch.equal(first.layers[1].weight, other.layers[1].weight)  # type: ignore[arg-type]
