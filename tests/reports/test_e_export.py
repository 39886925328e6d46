"""Theme E, export: what leaves a checkpoint is what the model's ``state_dict()`` would be, and others can load it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import engine
from engine import compat
from engine.checkpoint import CheckpointError, export, get_fp32_state_dict
from engine.cli.main import main
from tests.parity.runs import Pieces, assemble, pieces_of
from tests.parity.small import config_of, seeded

STAGES = range(4)
BF16 = {"bf16": {"enabled": True}}


class Everything(nn.Module):
    """Tied, frozen and 0-dim parameters; buffers that are saved, that are not, that two modules share, that are whole
    numbers, and one that 16 bit would round."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.ModuleList(nn.Linear(6, 6) for _ in range(11))
        for index in (1, 4, 10):
            self.middle[index].requires_grad_(False)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.norm_again = self.norm
        self.scale = nn.Parameter(torch.tensor(1.001))
        self.register_buffer("position", torch.arange(6) / 7)
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.norm(x.float()).to(x.dtype) + self.position.to(x.dtype)
        for layer in self.middle:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x * self.scale).float(), (tokens + 1) % 11)


def tokens_of(step: int, rank: int = 0, size: int = 6) -> Tensor:
    return torch.randint(11, (size,), generator=torch.Generator().manual_seed(100 * step + rank))


def start(stage: int, **more: Any) -> engine.Engine:
    config = {**config_of(stage, 1), "train_batch_size": 12, **more}
    return engine.initialize(model=seeded(Everything), config=config)[0]


def step(model_engine: engine.Engine, number: int = 0) -> None:
    size = model_engine.train_micro_batch_size_per_gpu()
    model_engine.backward(model_engine(tokens_of(number, model_engine.mesh.rank, size)))
    model_engine.step()


def train_and_save(stage: int, folder: Path, config: dict[str, Any]) -> tuple[Pieces, dict[str, Tensor]]:
    """This rank's masters, and buffers, after two steps; the checkpoint and the 16-bit model lie in ``folder``."""
    model_engine = start(stage, **config)
    for number in range(2):
        step(model_engine, number)
    model_engine.save_checkpoint(folder / "checkpoints")
    model_engine.save_16bit_model(folder / "sixteen")
    model_engine.save_16bit_model(folder / "sixteen", "model.safetensors")
    model_engine.save_16bit_model(folder / "sixteen", "trained.safetensors", exclude_frozen_parameters=True)
    masters = pieces_of(model_engine)
    buffers = {name: buffer.clone() for name, buffer in model_engine.module.named_buffers()}
    model_engine.destroy()
    return masters, buffers


def expected_state(results: list[tuple[Pieces, dict[str, Tensor]]]) -> dict[str, Tensor]:
    masters, (_, buffers) = assemble([pieces for pieces, _ in results]), results[0]
    fresh = Everything()
    names = {id(p): n for n, p in fresh.named_parameters()} | {id(b): n for n, b in fresh.named_buffers()}
    return {key: {**masters, **buffers}[names[id(value)]] for key, value in fresh.state_dict(keep_vars=True).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].to(value.dtype), value), name


# --- E4, E6: names, buffers, dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_e4_e6_names_buffers_and_dtypes(ranks, tmp_path, stage, precision):
    results = ranks(2).run(train_and_save, stage, tmp_path, BF16 if precision == "bf16" else {})
    expected = expected_state(results)
    fp32 = get_fp32_state_dict(tmp_path / "checkpoints")
    same(fp32, expected)
    assert {name for name, value in fp32.items() if value.dtype != torch.float32} == {
        "norm.num_batches_tracked",
        "norm_again.num_batches_tracked",
    }
    assert fp32["head.weight"] is fp32["embedding.weight"]
    Everything().load_state_dict(fp32, strict=True)

    (file,) = export(tmp_path / "checkpoints", tmp_path / "bf16", dtype="bf16")
    sixteen = load_file(file)
    rounded = {
        name: value.to(torch.bfloat16) if name in dict(Everything().named_parameters(remove_duplicate=False)) else value
        for name, value in expected.items()
    }
    assert {name: value.dtype for name, value in sixteen.items()} == {n: v.dtype for n, v in rounded.items()}
    same(sixteen, rounded)

    forward = rounded if precision == "bf16" else expected
    pickled = torch.load(tmp_path / "sixteen" / "pytorch_model.bin", weights_only=True)
    for found in (pickled, load_file(tmp_path / "sixteen" / "model.safetensors")):
        assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in forward.items()}
        same(found, forward)
    trained = load_file(tmp_path / "sixteen" / "trained.safetensors")
    assert {name for name in expected if name.startswith(("middle.1.", "middle.4.", "middle.10."))} == (
        expected.keys() - trained.keys()
    )


def test_e6_stored_dtypes_are_those_of_the_masters(ranks, tmp_path):
    ranks(1).run(train_and_save, 1, tmp_path, BF16)
    found = load_file(export(tmp_path / "checkpoints", tmp_path / "as_stored.safetensors", dtype="stored")[0])
    assert found["middle.0.weight"].dtype == torch.float32
    assert found["middle.1.weight"].dtype == torch.bfloat16


# --- shards, the command line, DeepSpeed's names --------------------------------------------------------------


def test_shards_with_an_index(ranks, tmp_path):
    expected = expected_state(ranks(2).run(train_and_save, 3, tmp_path, {}))
    files = export(tmp_path / "checkpoints", tmp_path / "out", max_shard_size="0.5KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted({*index["weight_map"].values()})
    assert [file.name for file in files] == [*shards, "model.safetensors.index.json"]
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    found: dict[str, Tensor] = {}
    for shard in shards:
        part = load_file(tmp_path / "out" / shard)
        assert all(index["weight_map"][name] == shard for name in part)
        assert sum(value.nbytes for value in part.values()) <= 500
        found |= part
    same(found, expected)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    # a whole file of the same name would be read before the index, and shards before it: neither stays
    export(tmp_path / "checkpoints", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    export(tmp_path / "checkpoints", tmp_path / "out", max_shard_size=1500)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_the_command_and_what_it_refuses(ranks, tmp_path, capsys):
    expected = expected_state(ranks(1).run(train_and_save, 2, tmp_path, BF16))
    folder, target = tmp_path / "checkpoints", tmp_path / "new" / "model.safetensors"
    for checkpoint in (folder, folder / "global_step2", tmp_path):
        assert main(["export", str(checkpoint), "--to", str(target)]) == 0
        assert f"{target}: {target.stat().st_size:,} bytes" in capsys.readouterr().out
        same(load_file(target), expected)
    assert main(["export", str(folder), "--tag", "global_step2", "--to", str(target), "--exclude-frozen"]) == 0
    assert "middle.1.weight" not in load_file(target)
    before = target.read_bytes()
    capsys.readouterr()
    for arguments, message in (
        (["--tag", "global_step9"], "lacks 'global_step9', the tag asked for. Tags there: global_step2."),
        (["--max-shard-size", "some"], "'some' is no size"),
    ):
        assert main(["export", str(folder), "--to", str(target), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), "--to", str(target)]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    changed = next((folder / "global_step2").glob("*.safetensors"))
    changed.write_bytes(changed.read_bytes()[:-1] + bytes([changed.read_bytes()[-1] ^ 1]))
    assert main(["export", str(folder), "--to", str(target)]) == 2
    assert "changed after being written" in capsys.readouterr().err
    assert target.read_bytes() == before
    assert {path.name for path in target.parent.iterdir()} == {"model.safetensors"}


def test_values_that_fp16_cannot_hold_are_refused_by_name(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1e6)
    model_engine, *_ = engine.initialize(model=model, config={"train_batch_size": 1})
    model_engine.save_checkpoint(tmp_path / "checkpoints")
    model_engine.destroy()
    with pytest.raises(CheckpointError, match=r"parameters\.weight.*do not fit float16"):
        export(tmp_path / "checkpoints", tmp_path / "out", dtype="fp16")
    assert list((tmp_path / "out").iterdir()) == []


def test_deepspeeds_names(ranks, tmp_path):
    expected = expected_state(ranks(2).run(train_and_save, 1, tmp_path, BF16))
    folder = tmp_path / "checkpoints"
    same(compat.get_fp32_state_dict_from_zero_checkpoint(folder), expected)
    assert "middle.1.weight" not in compat.get_fp32_state_dict_from_zero_checkpoint(folder, None, True)
    compat.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out")
    same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), expected)
    compat.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", safe_serialization=True)
    same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    same(compat.load_state_dict_from_zero_checkpoint(Everything(), folder).state_dict(), expected)


def fail_to_save(folder: Path) -> str:
    model_engine = start(3)
    (folder / "file").touch()
    torch.distributed.barrier()
    try:
        model_engine.save_16bit_model(folder / "file" / "inside")
    except engine.EngineError as error:
        step(model_engine)  # the ranks are still together
        return str(error)
    finally:
        model_engine.destroy()
    return "saved"


def test_a_16bit_model_that_cannot_be_written_is_refused_on_all_ranks(ranks, tmp_path):
    first, second = ranks(2).run(fail_to_save, tmp_path)
    assert first == second
    assert "Writing" in first
    assert "NotADirectoryError" in first


# --- E7: at any moment ---------------------------------------------------------------------------------------


def load_then_save(stage: int, folder: Path) -> None:
    model_engine = start(stage)
    model_engine.save_checkpoint(folder / "a")
    model_engine.destroy()
    model_engine = start(stage)
    model_engine.load_checkpoint(folder / "a")
    model_engine.save_checkpoint(folder / "b")
    model_engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_e7_exported_before_the_first_step_and_after_a_load(ranks, tmp_path, stage):
    ranks(2).run(load_then_save, stage, tmp_path)
    expected = seeded(Everything).state_dict()
    same(get_fp32_state_dict(tmp_path / "a"), expected)
    same(get_fp32_state_dict(tmp_path / "b"), expected)


# --- E12: weights only ---------------------------------------------------------------------------------------


def load_weights_and_stand_still(stage: int, folder: Path, config: dict[str, Any]) -> list[bool]:
    """Whether one step at learning rate 0 leaves what a weights-only load, or the model's own `load_state_dict`,
    brought."""
    still = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}}
    equal = []
    for source in ("checkpoint", "state_dict"):
        model_engine = start(stage, seed=7, **config, **still)
        step(model_engine, 5)
        if source == "checkpoint":
            path, _ = model_engine.load_checkpoint(folder / "checkpoints", load_module_only=True)
            assert path is not None
        elif stage == 3:
            break  # FSDP2 wants sharded values here
        else:
            model_engine.load_state_dict(get_fp32_state_dict(folder / "checkpoints"))
        before = pieces_of(model_engine)
        step(model_engine, 6)
        after = pieces_of(model_engine)
        equal.append(all(torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True)))
        model_engine.save_checkpoint(folder / source)
        model_engine.destroy()
    return equal


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_e12_weights_only_refreshes_the_masters(ranks, tmp_path, stage, precision):
    config = BF16 if precision == "bf16" else {}
    saved = expected_state(ranks(2).run(train_and_save, stage, tmp_path, config))
    for equal in ranks(2).run(load_weights_and_stand_still, stage, tmp_path, config):
        assert equal
        assert all(equal)
    found = get_fp32_state_dict(tmp_path / "checkpoint")
    parameters = dict(Everything().named_parameters())
    same({n: found[n] for n in parameters}, {n: saved[n] for n in parameters})


def save_without_an_optimizer(folder: Path) -> None:
    model_engine, *_ = engine.initialize(model=seeded(Everything), config={"train_batch_size": 12})
    model_engine.save_checkpoint(folder)
    model_engine.destroy()


def go_on_from_weights(folder: Path) -> tuple[str, list[str], int]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    model_engine = start(2, scheduler=schedule)
    told = Told()
    logging.getLogger("engine").addHandler(told)
    path, _ = model_engine.load_checkpoint(folder)
    logging.getLogger("engine").removeHandler(told)
    step(model_engine)
    steps = model_engine.global_steps
    model_engine.destroy()
    return str(path), told.lines, steps


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_e12_a_checkpoint_of_weights_alone_says_what_begins_anew(ranks, tmp_path):
    ranks(1).run(save_without_an_optimizer, tmp_path)
    (path, told, steps), _ = ranks(2).run(go_on_from_weights, tmp_path)
    assert path == str(tmp_path / "global_step0")
    (line,) = [line for line in told if "begin anew" in line]
    assert "the optimizer's state" in line
    assert "the learning-rate schedule" in line
    assert steps == 1


# --- E15: without the engine ---------------------------------------------------------------------------------

PLAIN = """
import sys
import torch
from safetensors.torch import load_file
from tests.reports.test_e_export import Everything  # the user's own model

before = set(sys.modules)
model = Everything()
model.load_state_dict(load_file(sys.argv[1]), strict=True)
print(float(model.embedding.weight.sum()))
"""


def test_e15_plain_pytorch_reads_it_without_a_process_group(ranks, tmp_path):
    expected = expected_state(ranks(2).run(train_and_save, 3, tmp_path, {}))
    (file,) = export(tmp_path / "checkpoints", tmp_path / "model.safetensors")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(file)], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == float(expected["embedding.weight"].sum())
