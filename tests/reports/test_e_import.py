"""Theme E, import: what a real DeepSpeed 0.19 wrote (deepspeed_checkpoint.py) goes on here, without DeepSpeed."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import engine
from engine.checkpoint import CheckpointError, CheckpointReader, get_fp32_state_dict, open_checkpoint
from engine.checkpoint.deepspeed import import_checkpoint
from engine.checkpoint.deepspeed.partitions import assign_to_groups, flat_parts, sharded_parts
from engine.cli.main import main
from tests.parity.runs import Pieces, assemble, pieces_of
from tests.reports.deepspeed_checkpoint import CASES, NUM_STEPS, TAG, Toy, config_of, groups, tokens_of

FIXTURES = Path(__file__).with_name("deepspeed")


def expected_of(case: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / case / "expected.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_parameters_moments_and_counters_are_deepspeeds(case, tmp_path, capsys):
    assert main(["import", str(FIXTURES / case), "--to", str(tmp_path)]) == 0
    assert f"imported into {tmp_path / TAG}; go on with --resume" in capsys.readouterr().out
    assert "deepspeed" not in sys.modules
    manifest = open_checkpoint(tmp_path)
    expected = {name: value for name, value in expected_of(case).items() if not name.startswith("after.")}
    steps = {f"optimizer.{n}.step" for n in dict(Toy().named_parameters()) if not n.startswith("fixed")}
    assert set(manifest.tensors) == {*expected, *steps}
    with CheckpointReader(manifest) as reader:
        for name, value in expected.items():
            assert torch.equal(reader.read(name).to(value.dtype), value), name
        skipped = manifest.counters["skipped_steps"]
        first = 1 if case == "stage0_fp16" else 0  # its optimizer is built with a step on gradients of zero
        assert {float(reader.read(name)) for name in steps} == {first + NUM_STEPS - skipped}
    assert manifest.counters["global_steps"] == NUM_STEPS
    assert manifest.counters["global_samples"] == 8 * NUM_STEPS
    assert manifest.aliases == {"head.weight": "embedding.weight"}
    assert manifest.layout.zero_stage == int(case[5])
    schedule = manifest.states["lr_scheduler"].values[0]
    assert (schedule["type"], schedule["scheduler"]) == ("WarmupLR", {"last_batch_iteration": NUM_STEPS - skipped - 1})
    Toy().load_state_dict(get_fp32_state_dict(tmp_path), strict=True)


def go_on(case: str, stage: int, folder: Path) -> tuple[Pieces, dict[str, Any]]:
    """Load at another stage and take the step that DeepSpeed took next."""
    config = {key: value for key, value in config_of(case).items() if key != "zero_force_ds_cpu_optimizer"}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}
    config["zero_optimization"] = {"stage": stage}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1.0}}  # what was saved counts
    model = Toy()
    model_engine, *_ = engine.initialize(model=model, model_parameters=groups(model), config=config)
    _, client_state = model_engine.load_checkpoint(folder)
    told = {
        "client_state": client_state,
        "loss_scale": model_engine.loss_scale,
        "lr": model_engine.get_lr(),
        "steps": model_engine.global_steps,
    }
    world = model_engine.mesh.world_size
    if world == 2:
        for half in tokens_of(NUM_STEPS, model_engine.mesh.rank).chunk(2):
            model_engine.backward(model_engine(half))
            model_engine.step()
    else:
        for index in range(2):
            model_engine.backward(model_engine(tokens_of(NUM_STEPS, index)))
            model_engine.step()
    told["applied"], told["loss"] = model_engine.was_step_applied(), model_engine.last_report.loss
    pieces = pieces_of(model_engine)
    model_engine.destroy()
    return pieces, told


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_it_goes_on_under_another_layout(ranks, tmp_path, case, world):
    import_checkpoint(FIXTURES / case, tmp_path)
    results = ranks(world).run(go_on, case, (int(case[5]) + 1) % 4, tmp_path)
    told, expected = results[0][1], expected_of(case)
    assert told["client_state"] == {"note": "kept", "epoch": 2}
    assert told["steps"] == NUM_STEPS
    assert told["applied"]
    saved = open_checkpoint(tmp_path).states
    assert told["lr"] == [saved["lr_scheduler"].values[0]["groups"][0]["lr"]] * 2
    if case.endswith("fp16"):
        assert told["loss_scale"] == saved["loss_scaler"].values[0]["scale"] > 1
    found = assemble([pieces for pieces, _ in results])
    for name, value in found.items():
        if case.endswith("fp32") and world == 2 and not name.startswith("fixed"):
            assert (value - expected[f"after.parameters.{name}"]).abs().max() <= 1e-6, name
        assert value.isfinite().all()
    moved = [n for n in found if not torch.equal(found[n], expected[f"parameters.{n}"])]
    assert moved or max(told["lr"]) == 0.0


def test_weights_only(tmp_path):
    path, notes = import_checkpoint(FIXTURES / "stage3_bf16", tmp_path, weights_only=True)
    assert notes == []
    manifest = open_checkpoint(path)
    assert {name.partition(".")[0] for name in manifest.tensors} == {"parameters", "buffers"}
    assert "optimizer_groups" not in manifest.states


# --- what is not trusted -------------------------------------------------------------------------------------


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def with_hostile_file(
    tmp_path: Path, hostile: Hostile, name: str = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
) -> Path:
    folder = tmp_path / "deepspeed"
    shutil.copytree(FIXTURES / "stage2_fp32", folder)
    torch.save({"optimizer_state_dict": hostile}, folder / TAG / name)
    return folder


@pytest.mark.parametrize("file", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_hostile_pickle_is_refused_by_name(tmp_path, capsys, file):
    marker = tmp_path / "was_run"
    for hostile, name in (
        (Hostile(os.system, f"touch {marker}"), "system"),
        (Hostile(eval, f"open({str(marker)!r}, 'w')"), "eval"),
        (Hostile(getattr, Path, "touch"), "getattr"),
    ):
        folder = with_hostile_file(tmp_path, hostile, file)
        assert main(["import", str(folder), "--to", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert file in said
        assert name in said
        assert "it was not read" in said
        assert not marker.exists()
        assert not (tmp_path / "out").exists()
        shutil.rmtree(folder)


def test_the_allowed_classes_cannot_be_made_to_act(tmp_path):
    """The stand-ins take attributes and have none that do something; a stage is a number or nothing."""
    folder = tmp_path / "deepspeed"
    shutil.copytree(FIXTURES / "stage2_fp32", folder)
    file = folder / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = b"\x80\x02cdeepspeed.runtime.zero.config\nZeroStageEnum\nU\x08__class_\x85R."
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in parts.items():
            archive.writestr(name, content if name.endswith("data.pkl") else value)
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_checkpoint(folder, tmp_path / "out")


# --- what is missing, damaged or of another kind -------------------------------------------------------------


def test_what_cannot_be_read_is_named(tmp_path, capsys):
    folder = tmp_path / "deepspeed"

    def refused(*arguments: str) -> str:
        assert main(["import", str(folder), "--to", str(tmp_path / "out"), *arguments]) == 2
        return capsys.readouterr().err

    assert "is no folder" in refused()
    shutil.copytree(FIXTURES / "stage2_fp32", folder)
    assert "lacks the checkpoint 'global_step9'" in refused("--tag", "global_step9")
    assert "lacks the checkpoint '../..'" in refused("--tag", "../..")
    first, second = (folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    assert f"{second} cannot be read" in refused()
    second.write_bytes(pickle.dumps([1, 2]))
    assert str(second) in refused()
    second.unlink()
    assert "2" in refused()
    assert "1 ranks" in refused()
    second.write_bytes(whole)
    first.rename(first.with_name("zero_pp_rank_2_mp_rank_00_optim_states.pt"))
    assert "a file of rank 0 is missing" in refused()
    shutil.rmtree(folder)
    for name, said in (
        ("layer_00-model_states.pt", "pipeline"),
        ("layer_3_expert_1_mp_rank_00_model_states.pt", "experts"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
    ):
        shutil.copytree(FIXTURES / "stage1_bf16", folder)
        (folder / TAG / name).touch()
        assert said in refused()
        shutil.rmtree(folder)
    (folder / TAG).mkdir(parents=True)
    assert "is no DeepSpeed checkpoint" in refused("--tag", TAG)
    assert not (tmp_path / "out").exists()


# --- how parameters are cut ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_element_is_in_one_part(num_ranks):
    shapes = [{"a": (5, 3), "b": (), "c": (1,), "d": (7,)}, {"e": (2, 2, 3)}]
    sizes = [-(-24 // num_ranks), -(-12 // num_ranks)]
    cut = {"flat": flat_parts(shapes, sizes, num_ranks, None)}
    per_rank = sum(-(-torch.Size(s).numel() // num_ranks) for group in shapes for s in group.values())
    for border in range(1, per_rank):
        cut[f"sharded {border}"] = sharded_parts(shapes, [border, per_rank - border], num_ranks)
    for how, parts in cut.items():
        seen: dict[str, set[int]] = {}
        for part in parts:
            elements = set(range(part.start, part.start + part.numel))
            assert not seen.setdefault(part.name, set()) & elements, how
            seen[part.name] |= elements
        for group in shapes:
            for name, shape in group.items():
                assert seen[name] == set(range(torch.Size(shape).numel())), how


def test_groups_are_found_by_shape_where_only_one_way_fits():
    shapes = {"w1": (2, 2), "b1": (2,), "frozen": (9,), "w2": (2, 2), "b2": (2,)}
    assert assign_to_groups(shapes, [[(2, 2), (2, 2)], [(2,), (2,)]]) == [["w1", "w2"], ["b1", "b2"]]
    assert assign_to_groups(shapes, [[(2, 2)], [(2, 2)]]) is None
    assert assign_to_groups(shapes, [[(2, 2)]]) is None
    assert assign_to_groups(shapes, [[(3,)]]) is None
