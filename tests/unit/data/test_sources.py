from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contracts import EngineError
from engine.data import tokens
from engine.data.sources import open_text


def write_tokens(path: Path, ids: Any, dtype: str = "<u2") -> str:
    np.asarray(ids, dtype=dtype).tofile(path)
    return str(path)


def text_folder(root: Path, num_files: int = 20) -> Path:
    for index in range(num_files):
        file = root / f"part{index % 3}" / f"file{index:02d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text number {index:02d} " * 10)
    return root


def test_a_memory_map_is_pickled_as_its_place_in_the_file(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "corpus.bin", np.arange(50_000) % 1000)
    corpus = open_text(path, 8)
    assert isinstance(corpus.train.tokens, np.memmap)
    for blocks in (corpus.train, corpus.validation):
        pickled = pickle.dumps(blocks)
        assert len(pickled) < 1000
        assert np.array_equal(pickle.loads(pickled).tokens, blocks.tokens)


# --- files -------------------------------------------------------------------------------------------------


def test_a_text_file_is_split_by_position(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)))
    corpus = open_text(str(path), 5)
    assert corpus.train.tokens.tolist() == list(range(180))
    assert corpus.validation.tokens.tolist() == list(range(180, 200))
    assert (corpus.vocabulary_size, corpus.is_text, corpus.num_files, corpus.source) == (256, True, 1, str(path))
    assert len(open_text(str(path), 5, validation_fraction=0.25).validation.tokens) == 50


def test_a_folder_is_split_by_file_whatever_the_order_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = text_folder(tmp_path)
    corpus = open_text(str(folder), 8)
    parts = {name: bytes(getattr(corpus, name).tokens).decode().splitlines() for name in ("train", "validation")}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.txt"))
    in_order = [(folder / name).read_text() for name in names]
    assert len(parts["validation"]) == 2
    assert [text for text in in_order if text not in parts["validation"]] == parts["train"]
    assert [text for text in in_order if text not in parts["train"]] == parts["validation"]

    walk = os.walk

    def backwards(*args: Any, **options: Any) -> Any:
        for parent, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield parent, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    again = open_text(str(folder), 8)
    assert np.array_equal(again.train.tokens, corpus.train.tokens)
    assert np.array_equal(again.validation.tokens, corpus.validation.tokens)


def test_the_split_of_a_folder_follows_the_names_not_the_place(tmp_path: Path) -> None:
    first, second = (open_text(str(text_folder(tmp_path / name)), 8) for name in ("here", "there"))
    assert np.array_equal(first.validation.tokens, second.validation.tokens)


def test_a_folder_leaves_out_what_is_no_text(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "corpus")
    expected = open_text(str(folder), 8)
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0no")
    (folder / "empty.txt").touch()
    write_tokens(folder / "tokens.bin", [257] * 9)
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    corpus = open_text(str(folder), 8)
    assert corpus.num_files == expected.num_files == 20
    assert np.array_equal(corpus.train.tokens, expected.train.tokens)


def test_a_folder_of_two_files_holds_one_out_and_of_one_file_its_tail(tmp_path: Path) -> None:
    two = open_text(str(text_folder(tmp_path / "two", 2)), 8)
    assert len(two.train.tokens) == len(two.validation.tokens) == 150
    one = open_text(str(text_folder(tmp_path / "one", 1)), 8)
    assert (len(one.train.tokens), len(one.validation.tokens)) == (135, 15)


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    corpus = open_text(None, 128, vocabulary_size=256)
    assert corpus.num_files > 300
    share = len(corpus.validation.tokens) / (len(corpus.validation.tokens) + len(corpus.train.tokens))
    assert 0.03 < share < 0.25
    both = bytes(corpus.train.tokens) + bytes(corpus.validation.tokens)
    assert b"class JSONDecoder(object):" in both
    assert b"import unittest\nfrom test import support" not in both
    assert corpus.source == "the Python standard library"


def test_token_files_hold_little_endian_ids_of_two_or_four_bytes(tmp_path: Path) -> None:
    ids = [*range(65500, 65536), 7, 300, 301, 302]
    for name, dtype in (("short.bin", "<u2"), ("long.u32.bin", "<u4")):
        corpus = open_text(write_tokens(tmp_path / name, ids, dtype), 3)
        assert corpus.train.tokens.tolist() + corpus.validation.tokens.tolist() == ids
        assert (corpus.vocabulary_size, corpus.is_text) == (65536, False)
    assert open_text(str(tmp_path / "short.bin"), 3, vocabulary_size=70_000).vocabulary_size == 70_000


def test_a_sidecar_names_dtype_and_vocabulary(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "corpus.bin", [70_000] * 40, "<u4")
    (tmp_path / "corpus.json").write_text('{"dtype": "uint32", "vocabulary_size": 80000}')
    corpus = open_text(path, 3)
    assert set(corpus.train.tokens.tolist()) == {70_000}
    assert corpus.vocabulary_size == 80_000


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sidecar", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "not a description of corpus.bin"),
        ('{"dtyp": "uint16"}', "not a description of corpus.bin"),
        ('{"dtype": "int32"}', "dtype is 'int32'"),
        ('{"vocabulary_size": 0}', "vocabulary_size is 0"),
        ('{"vocabulary_size": "9"}', "vocabulary_size is '9'"),
        ('{"vocabulary_size": true}', "vocabulary_size is True"),
        ('{"vocabulary_size": 7}', "token id 7 at position 0 .* vocabulary of 7"),
    ],
)
def test_refuses_a_sidecar(tmp_path: Path, sidecar: str, words: str) -> None:
    path = write_tokens(tmp_path / "corpus.bin", [7] * 40)
    (tmp_path / "corpus.json").write_text(sidecar)
    with pytest.raises(EngineError, match=words):
        open_text(path, 3)


@pytest.mark.parametrize("position", [0, 17, 18, 19])
def test_names_the_first_token_outside_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(tokens, "CHUNK_TOKENS", 4)
    ids = [9] * 20
    ids[position] = 300
    path = write_tokens(tmp_path / "corpus.bin", ids)
    with pytest.raises(EngineError, match=rf"corpus.bin: token id 300 at position {position} .* vocabulary of 256"):
        open_text(path, 1, vocabulary_size=256)
    assert open_text(path, 1, vocabulary_size=301).vocabulary_size == 301
    assert open_text(path, 1).vocabulary_size == 301


def test_text_is_checked_against_the_vocabulary_too(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"a" * 50 + b"\xe4" + b"a" * 50)
    with pytest.raises(EngineError, match=r"text.txt: token id 228 at position 50 .* vocabulary of 128"):
        open_text(str(tmp_path / "text.txt"), 3, vocabulary_size=128)
    folder = text_folder(tmp_path / "folder")
    (folder / "part0" / "file00.txt").write_bytes(b"a" * 9 + b"\xff")
    with pytest.raises(EngineError, match=r"file00.txt: token id 255 at position 9 "):
        open_text(str(folder), 3, vocabulary_size=128)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "cannot be read: no such file"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.mkdir(), "holds no text file"),
        (lambda path: os.mkfifo(path), "neither a file nor a folder"),
        (lambda path: path.write_bytes(b"abc"), "training part has 2 tokens, one block needs 9"),
        (lambda path: path.write_bytes(b"a" * 80), "validation part has 8 tokens, one block needs 9"),
    ],
)
def test_refuses_a_path(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "corpus")
    with pytest.raises(EngineError, match=words):
        open_text(str(tmp_path / "corpus"), 8)


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(EngineError, match=r"data\.path is empty"):
        open_text("", 8)


def test_refuses_a_token_file_that_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").write_bytes(b"abc")
    with pytest.raises(EngineError, match="3 bytes, which is no multiple of 2"):
        open_text(str(tmp_path / "corpus.bin"), 1)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_refuses_a_fraction_that_leaves_one_part_empty(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(EngineError, match="validation_fraction"):
        open_text(None, 8, validation_fraction=fraction)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    folder = text_folder(tmp_path / "folder")
    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(EngineError, match=r"file00.txt cannot be read: permission denied"):
        open_text(str(folder), 8)
    monkeypatch.setattr(np, "memmap", forbidden)
    with pytest.raises(EngineError, match=r"file01.txt cannot be read: permission denied"):
        open_text(str(folder / "part1" / "file01.txt"), 8)
