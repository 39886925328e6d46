"""The commands that need no torch, the exit codes, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main as cli
from engine.cli.main import COMMANDS, main, module_of
from engine.cli.options import real_world
from engine.cli.resolved import absolute_target, data_path, resolved_config
from engine.cli.train import check_output, named_checkpoint, vocabulary_size
from engine.config import load_config
from engine.contracts import EngineError, RunFailed
from engine.launch import RankEnvironment
from engine.launch.outcome import FAILURE_DIRECTORY
from engine.plan import World, plan

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = {
    "model": {"target": "model.py:Model"},
    "training": {"steps": 3},
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", FAILURE_DIRECTORY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_commands_that_need_no_torch_do_not_import_it(config: Path) -> None:
    script = """
import contextlib, io, sys
from engine.cli.main import COMMANDS, main
path = sys.argv[1]
with contextlib.redirect_stdout(io.StringIO()):
    codes = [main(["validate", path]), main(["plan", path, "--no-model"]), main(["schema"])]
    codes.append(main(["--config", path, "--dry-run"]))
    codes += [main(["explain", path]), main(["diff", path, path]), main(["--help"])]
    codes.append(main(["init", "--model-size", "1b", "--gpus", "8", "--memory", "80GB", "--output", "-"]))
    for command in COMMANDS:
        try:
            main([command, "--help"])
        except SystemExit as exit:
            codes.append(exit.code)
print(codes, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(config)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{[0] * (8 + len(COMMANDS))} False\n", done.stderr


def test_dry_run_prints_the_plan_of_so_many_ranks(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config), "--dry-run", "--nproc", "2", "--set", "zero_optimization.stage=1"]) == 0
    out = capsys.readouterr().out
    assert "8 samples [user] = 4 micro [derived] x 1 accumulation x 2 dp" in out
    assert "stage 1" in out
    assert list(config.parent.iterdir()) == [config]


def test_train_is_the_default_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", str(config), "--dry-run"]) == 0
    named = capsys.readouterr().out
    assert main(["--config", str(config), "--dry-run"]) == 0
    assert capsys.readouterr().out == named


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    listed = out.partition("commands:\n")[2].partition("\n\n")[0]
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    assert dict(lines) == COMMANDS
    assert max(map(len, out.splitlines())) <= 100
    files = {path.stem for path in (ROOT / "engine/cli").glob("*.py") if "def run(argv" in path.read_text()}
    assert files == set(map(module_of, COMMANDS))
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: ptrain")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("validat", "there is no command validat; did you mean validate?"),
        ("expalin", "did you mean explain?"),
        ("run.json", "to train, write ptrain --config run.json"),
        ("zzz", "there is no command zzz (commands: train, plan, "),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(
    word: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "x"]) == 2
    assert answer in capsys.readouterr().err


def test_mistakes_are_told_without_a_traceback(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config), "--dry-run", "--nproc", "3"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ptrain: ")
    assert "train_batch_size" in err
    assert "Traceback" not in err
    assert main(["--config", str(config.with_name("absent.json"))]) == 2
    assert "absent.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "words"), [("model", "model.target is missing"), ("training", "training.steps is missing")]
)
def test_what_a_run_needs(config: Path, capsys: pytest.CaptureFixture[str], key: str, words: str) -> None:
    config.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != key}))
    assert main(["--config", str(config)]) == 2
    assert words in capsys.readouterr().err


def test_validate_tells_verdicts_apart(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "valid"
    assert main(["validate", str(config), "--json", "--set", "zero_optimisation.stage=1"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "invalid"
    assert found["problems"][0]["path"] == "zero_optimisation"
    assert main(["validate", str(config), "--lenient", "--set", "zero_optimisation.stage=1"]) == 0
    assert main(["validate", str(config), "--world", "3"]) == 2


def test_plan_can_list_every_value(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--values"]) == 0
    assert any(line.split()[:3] == ["train_batch_size", "8", "user"] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (EngineError("a mistake"), 2, "ptrain: a mistake\n"),
        (RunFailed("it failed"), 1, "ptrain: it failed\n"),
        (ZeroDivisionError("unforeseen"), 1, "ZeroDivisionError: unforeseen\n"),
        (KeyboardInterrupt(), 130, "ptrain: stopped by SIGINT before training began; nothing was saved\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str) -> None:
    def run(arguments: Any) -> int:
        raise error

    assert cli._guarded(run, []) == code
    assert capsys.readouterr().err.endswith(words)


def test_a_launched_rank_leaves_its_message_to_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    cli.tell("first")
    assert capsys.readouterr().err == "ptrain: rank 1: first\n"
    monkeypatch.setenv(FAILURE_DIRECTORY, str(tmp_path))
    cli.tell("second")
    assert capsys.readouterr().err == ""
    assert (tmp_path / "rank1").read_text() == "second"


def test_nproc_must_agree_with_the_ranks_that_exist() -> None:
    config = load_config(CONFIG | {"device": "cpu"})
    joined = RankEnvironment(0, 0, 2, 2, "127.0.0.1", 1, "torchrun")
    assert real_world(config, joined, 2).size == 2
    with pytest.raises(EngineError, match="--nproc is 3, but torchrun has started 2 ranks"):
        real_world(config, joined, 3)
    assert real_world(config, RankEnvironment(), None).size == 1
    assert real_world(config, RankEnvironment(), 4).local_size == 4


def test_output_is_tried_and_left_alone(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"--output: .*file/run cannot be written"):
        check_output(tmp_path / "file" / "run")


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that its owner may not write into, by somebody whom that stops: root goes without its rights."""
    somebody = 65534 if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        if somebody != os.geteuid():
            os.chown(folder, somebody, -1)
        os.chmod(folder, 0o500)
        before = os.geteuid()
        os.seteuid(somebody)
        try:
            yield Path(folder)
        finally:
            os.seteuid(before)
            os.chmod(folder, 0o700)


def test_output_without_permission(nobody: Path) -> None:
    with pytest.raises(EngineError, match="permission denied"):
        check_output(nobody / "run")


def test_resume_takes_a_checkpoint_a_folder_of_them_or_an_output(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "global_step5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert named_checkpoint(checkpoint) == (tmp_path / "checkpoints", "global_step5")
    assert named_checkpoint(tmp_path / "checkpoints") == (tmp_path / "checkpoints", None)
    assert named_checkpoint(tmp_path) == (tmp_path / "checkpoints", None)
    with pytest.raises(EngineError, match="no folder"):
        named_checkpoint(tmp_path / "absent")


def test_relative_data_lies_beside_the_config_first(tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    assert data_path("text.txt", tmp_path) == str(tmp_path / "text.txt")
    assert data_path("other.txt", tmp_path) == "other.txt"
    assert data_path(None, tmp_path) is None


def test_a_resolved_config_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    written = {name: value for name, value in CONFIG.items() if name != "train_batch_size"} | {
        "train_micro_batch_size_per_gpu": 4,
        "data": {"path": "text.txt"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": "auto"}},
    }
    planned = plan(load_config(written), World(2, 2))
    resolved = resolved_config(planned, tmp_path)
    assert resolved["train_batch_size"] == 8
    assert resolved["scheduler"]["params"]["total_num_steps"] == 3
    assert resolved["data"]["path"] == str(tmp_path / "text.txt")
    assert resolved["model"]["target"] == f"{tmp_path / 'model.py'}:Model"
    again = plan(load_config(resolved), World(1, 1))
    assert (again.batch.global_batch_size, again.batch.accumulation_steps) == (8, 2)
    assert again.schedule == planned.schedule


def test_only_targets_in_files_have_a_place(tmp_path: Path) -> None:
    assert absolute_target("package.module:Model", tmp_path) == "package.module:Model"
    assert absolute_target("package.module.Model", tmp_path) == "package.module.Model"
    assert absolute_target("../model.py:Model", tmp_path / "sub").endswith("sub/../model.py:Model")


def test_vocabulary_is_the_models_or_the_configs() -> None:
    config = load_config(CONFIG | {"vocabulary_size": 512})
    assert vocabulary_size(config, {"vocabulary_size": 256}) == 256
    assert vocabulary_size(config, {"vocab_size": 300}) == 300
    assert vocabulary_size(config, {"width": 3}) == 512
