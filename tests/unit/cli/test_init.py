"""`ptrain init`: what it proposes fits and is valid; it asks on a terminal only and replaces nothing."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.config import EngineError, load_config
from engine.plan import ModelFacts, World, estimate_memory, plan, validate
from engine.plan.propose import USABLE, Choice, Wish, propose, shape
from engine.plan.sizes import format_count, parse_bytes, parse_count

SIZES = (10**7, 125 * 10**6, 1_300_000_000, 7 * 10**9, 70 * 10**9)
GPUS = (0, 1, 2, 6, 8, 64)
MEMORIES = (16 * 10**9, 80 * 10**9)


def grid() -> list[Wish]:
    wishes = []
    for size, gpus, memory in itertools.product(SIZES, GPUS, MEMORIES):
        for precision in ("bf16", "fp16", "fp32"):
            wishes.append(Wish(size, gpus, memory if gpus else None, precision=precision))  # type: ignore[arg-type]
    return wishes


def proposal(wish: Wish) -> Choice | None:
    """None where the model is refused as too large."""
    try:
        return propose(wish)
    except EngineError as error:
        if "do not fit" in str(error):
            return None
        raise


def test_proposals_are_valid_and_fit() -> None:
    proposed = 0
    for wish in grid():
        choice = proposal(wish)
        if choice is None:
            continue
        proposed += 1
        assert validate(choice.config, wish.ranks).kind == "valid"
        made = plan(load_config(choice.config), World(wish.ranks, wish.ranks))
        assert made.batch.micro_batch_size == choice.micro_batch_size
        assert made.batch.accumulation_steps == choice.accumulation_steps
        if wish.memory_bytes is not None:
            states = estimate_memory(made, ModelFacts(wish.num_parameters, wish.num_parameters)).total_bytes
            assert states is not None
            assert states <= USABLE * wish.memory_bytes or made.zero.stage == 3
            assert choice.needed_bytes <= USABLE * wish.memory_bytes
    assert proposed > len(grid()) / 2


def written(tmp_path: Path, *flags: str) -> tuple[Path, str]:
    file = tmp_path / "new" / "config.json"
    assert main(["init", *flags, "--output", str(file)]) == 0
    return file, file.read_text()


@pytest.mark.parametrize(
    "flags",
    [
        ("--model-size", "1.3b", "--gpus", "8", "--memory", "80GB"),
        ("--model-size", "13b", "--gpus", "8", "--memory", "80GiB", "--precision", "fp16"),
        ("--model-size", "10m", "--gpus", "0", "--sequence-length", "128", "--steps", "50"),
        ("--model-size", "125m", "--gpus", "1", "--memory", "24GB"),
    ],
)
def test_the_file_is_valid_and_says_why(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = written(tmp_path, *flags)
    assert max(map(len, text.splitlines())) <= 100
    gpus = max(1, int(flags[3]))
    assert main(["validate", str(file), "--world", str(gpus), "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["verdict"] == "valid"
    # each group of keys has its comment
    groups = text.split("\n\n")[1:]
    assert len(groups) >= 3
    assert all(group.lstrip().startswith("// ") for group in groups)
    if gpus > 1:
        assert "Instead, stage 0" in text


def test_memory_decides_the_stage() -> None:
    billion = 10**9
    stages = [propose(Wish(size * billion, 8, 80 * billion)).stage for size in (1, 13)]
    assert stages[0] < stages[1] == 3
    assert propose(Wish(billion, 1, 80 * billion)).config.get("zero_optimization") is None


def test_what_does_not_fit_is_refused_with_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["init", "--model-size", "70b", "--gpus", "8", "--memory", "80GB", "--output", "-"]
    assert main(flags) == 2
    err = capsys.readouterr().err
    assert "70 billion parameters do not fit: at stage 3 on 8 GPUs" in err
    assert "64 GPUs would do" in err
    assert main([*flags[:4], "64", *flags[5:]]) == 0


def test_the_shape_of_a_gpt() -> None:
    layers, width = shape(1_300_000_000)
    assert 12 * layers * width**2 == pytest.approx(1.3e9, rel=0.05)


def test_nothing_is_replaced_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text("mine")
    flags = ["init", "--model-size", "1b", "--gpus", "8", "--memory", "80GB", "--output", str(file)]
    assert main(flags) == 2
    assert "pass --force" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main([*flags, "--force"]) == 0
    assert "train_batch_size" in file.read_text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_questions_are_asked_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO("1b\n8\n80GB\n"))
    assert main(["init", "--output", str(file)]) == 2
    assert "--model-size, --gpus, --memory missing" in capsys.readouterr().err
    asked: list[str] = []
    answers = iter(["huge", "1b", "8", "80GB"])

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "--output", str(file)]) == 0
    assert len(asked) == 4
    assert validate(str(file), 8).kind == "valid"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.3b", 1_300_000_000), ("125M", 125_000_000), ("1_000", 1000), ("1e9", 10**9), ("7 B", 7 * 10**9)],
)
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(("text", "value"), [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("16g", 16 * 10**9)])
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "b", "-3", "0", "1.3x", "nan", "1.2.3", "1 2"])
def test_what_is_no_size(text: str) -> None:
    for parse in (parse_count, parse_bytes):
        with pytest.raises(EngineError, match="is not a"):
            parse(text)


def test_counts_in_words() -> None:
    assert [format_count(count) for count in (9500, 125 * 10**6, 13 * 10**8, 10**12)] == [
        "9,500", "125 million", "1.3 billion", "1 trillion",
    ]  # fmt: skip
