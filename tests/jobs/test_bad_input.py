"""Mistakes and failures: one clear message, the exit code, nothing half-written, soon."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Arguments
from tests.jobs.job import EXAMPLE, MODELS, ROOT, Finished, run, start

MISTAKE, FAILURE = 2, 1
MAX_SECONDS = 60
"""Tells a hang from an end, on a machine that is busy with other tests: alone, every case here ends within ten."""


def assert_told(finished: Finished, code: int, *words: str) -> None:
    """The message is all there is on standard error, and it is there once."""
    assert finished.code == code, finished.err
    assert "Traceback" not in finished.err
    message = "\n".join(line for line in finished.err.splitlines() if not line.startswith("step "))
    assert message.startswith("ptrain: ")
    assert message.count("ptrain: ") == 1, message
    for word in words:
        assert message.count(word) == 1, f"{word!r} in {message}"
    assert finished.seconds < MAX_SECONDS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"train_batch_size": 8,,}', ["run.json:1:24: a second comma"]),
        ('{"train_batch_sise": 8}', ["run.json:1:2", "train_batch_sise", "train_batch_size"]),
        ("", ["run.json:1:1: is empty"]),
        ("[]", ["run.json:1:1: the file does not hold a JSON object"]),
    ],
)
def test_a_config_that_is_wrong(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert_told(run(["--config", "run.json"], cwd=tmp_path), MISTAKE, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    assert_told(run(["--config", "absent.json"], cwd=tmp_path), MISTAKE, "absent.json: there is no such file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "zero_optimisation.stage=1"], ["--set", "zero_optimization"]),
        (["--set", "train_batch_size"], ["--set", "train_batch_size"]),
        (["--set", "train_batch_size=many"], ["--set", "train_batch_size", "many"]),
        (["--nproc", "3"], ["train_batch_size", "16", "3"]),
        (["--nproc", "2", "--set", "device=cuda"], ["device", "cuda"]),
        (["--set", "training.steps=0"], ["--set", "training.steps"]),
    ],
)
def test_a_call_that_is_wrong(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    output = tmp_path / "output"
    finished = run(["--config", str(EXAMPLE), "--output", str(output), *arguments], CUDA_VISIBLE_DEVICES="")
    assert finished.code == MISTAKE
    assert "Traceback" not in finished.err
    assert finished.err.count("ptrain: ") == 1
    for word in words:
        assert word in finished.err
    assert not output.exists()


def test_an_unknown_option_is_told_with_the_usage(tmp_path: Path) -> None:
    finished = run(["--config", str(EXAMPLE), "--outptu", str(tmp_path / "output")])
    assert finished.code == MISTAKE
    assert "unrecognized arguments: --outptu" in finished.err


IN_THE_RANKS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model.target": "absent.py:GPT"}, ["model.target", "absent.py:GPT", "there is no file"]),
    ({"model.args.widht": 3}, ["model.args.widht", "did you mean 'width'?"]),
    ({"data.path": "/nowhere/text"}, ["data.path", "/nowhere/text"]),
    ({"model.target": "model.py:GTP"}, ["model.target", "GTP'; did you mean 'GPT'?"]),
    ({"model.target": "no_such_package.model:GPT"}, ["model.target", "there is no module 'no_such_package'"]),
    ({"model.args.width": "wide"}, ["model.target", "building GPT failed", "gpt_text/model.py:"]),
    ({"model.args.vocabulary_size": 100}, ["token id", "vocabulary of 100"]),
    ({"data.path": os.devnull}, ["data.path", os.devnull]),
]


@pytest.mark.parametrize(
    ("changes", "words", "nproc"),
    [
        pytest.param(changes, words, nproc, marks=[] if index < 2 else pytest.mark.slow)
        for index, (nproc, (changes, words)) in enumerate(zip([2, 1, 2, *[1] * 5], IN_THE_RANKS, strict=True))
    ],
)
def test_what_only_the_ranks_find_is_told_once(
    changes: dict[str, Any], words: list[str], nproc: int, small: Arguments, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    finished = run(small(output, changes, "--nproc", str(nproc)))
    assert_told(finished, MISTAKE, *words)
    assert "rank" not in finished.err, "all ranks say the same, so none is named"
    assert not output.exists()


@pytest.mark.parametrize(("content", "words"), [("", "is empty"), ("short", "tokens, one block needs 33")])
def test_text_that_is_too_short(content: str, words: str, small: Arguments, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(content)
    finished = run(small(tmp_path / "output", {"data.path": str(tmp_path / "text.txt")}))
    assert_told(finished, MISTAKE, str(tmp_path / "text.txt"), words)
    assert not (tmp_path / "output").exists()


def test_an_output_that_is_a_file(small: Arguments, tmp_path: Path) -> None:
    (tmp_path / "output").touch()
    finished = run(small(tmp_path / "output", {}, "--nproc", "2"))
    assert_told(finished, MISTAKE, "--output", "cannot be written", "not a directory")
    assert (tmp_path / "output").read_bytes() == b""


def test_a_loss_that_is_not_a_number(faulty: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "output"
    finished = run(faulty(output, "nan", {"model.args.on_rank": 1}, "--nproc", "2"))
    assert_told(finished, FAILURE, "step 1", "the loss is nan", "rank 1")
    assert not (output / "checkpoints").exists()
    assert not (output / "summary.json").exists()
    assert json.loads((output / "metrics.jsonl").read_text())["loss"] is None


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_that_raises(nproc: int, faulty: Arguments, tmp_path: Path) -> None:
    changes = {"model.args.at_forward": 3, "model.args.on_rank": nproc - 1}
    finished = run(faulty(tmp_path / "output", "raise", changes, "--nproc", str(nproc)))
    where = ["rank 1"] if nproc == 2 else []
    assert_told(finished, FAILURE, "step 3", "ValueError: a planted fault", f"{MODELS}:", *where)
    assert not (tmp_path / "output" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("spoil", "words", "nproc"),
    [
        (lambda folder: corrupt(folder / "rank_00000.safetensors"), "rank_00000.safetensors", 2),
        *(
            pytest.param(spoil, words, 1, marks=pytest.mark.slow)
            for spoil, words in (
                (lambda folder: (folder / "rank_00000.safetensors").unlink(), "rank_00000.safetensors"),
                (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
                (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
            )
        ),
    ],
)
def test_a_checkpoint_that_is_broken(
    spoil: Any, words: str, nproc: int, small: Arguments, whole_run: tuple[Path, Finished], tmp_path: Path
) -> None:
    expected, _ = whole_run
    output = tmp_path / "output"
    shutil.copytree(expected, output)
    spoil(output / "checkpoints" / "global_step12")
    before = (output / "metrics.jsonl").read_bytes()
    finished = run(small(output, {"training.steps": 14}, "--nproc", str(nproc), "--resume", "auto"))
    assert finished.code == MISTAKE, finished.err
    assert "Traceback" not in finished.err
    assert finished.err.count("ptrain: ") == 1
    assert words in finished.err
    assert "global_step12" in finished.err
    assert (output / "metrics.jsonl").read_bytes() == before
    assert finished.seconds < MAX_SECONDS


def test_a_path_to_resume_from_that_is_not_there(small: Arguments, tmp_path: Path) -> None:
    output = tmp_path / "output"
    finished = run(small(output, {}, "--resume", str(tmp_path / "absent")))
    assert_told(finished, MISTAKE, "--resume", str(tmp_path / "absent"), "expected 'auto'")
    assert not output.exists()


def test_a_port_that_somebody_else_has(small: Arguments, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        described = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        finished = start(small(tmp_path / "output"), RANK="0", LOCAL_RANK="0", **described).finish()
    assert_told(finished, MISTAKE, f"another process listens at 127.0.0.1:{port}", "MASTER_PORT")
    assert not (tmp_path / "output").exists()


@pytest.mark.slow
def test_under_torchrun_every_rank_tells_its_name(small: Arguments, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    output = tmp_path / "output"
    finished = run([str(ROOT / "bin" / "ptrain"), *small(output, {"model.args.widht": 3})], command=torchrun)
    assert finished.code != 0
    for rank in range(2):
        assert f"ptrain: rank {rank}: model.args.widht: GPT has no argument" in finished.err
    assert not output.exists()


def corrupt(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0xFF
    path.write_bytes(content)
