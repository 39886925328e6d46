"""What is in the folder: tags, `latest`, leftovers of crashes, retention."""

from __future__ import annotations

import os

import pytest
import torch

from engine.checkpoint import CheckpointError, Retention, default_tag, list_tags, load_tensors, prune, read_manifest
from engine.checkpoint.folder import check_tag


@pytest.fixture
def put(world, tmp_path):
    """Save a checkpoint whose one tensor holds ``number``."""

    def write(tag, number=0, **options):
        counters = {"global_steps": number}
        chunks = [[world.whole("parameters.x", torch.tensor(number))]]
        return world.save(tmp_path, tag, chunks, counters=counters, **options)

    return write


def number_in(world, directory, tag=None):
    target = torch.tensor(-1)
    load_tensors(directory, tag, [world.whole("parameters.x", target)])
    return target.item()


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "a\\b", ".hidden", "latest", "a\n", " a", "a\0", "x" * 201, None, 1.5]
)
def test_tags_that_cannot_name_a_folder(tag):
    with pytest.raises(CheckpointError, match="cannot be used"):
        check_tag(tag)


def test_tags_that_can():
    assert check_tag(default_tag(12)) == "global_step12"
    assert check_tag(12) == "12"
    assert check_tag("épochs, 3") == "épochs, 3"


def test_missing_and_empty_folders_hold_nothing(world, tmp_path):
    assert read_manifest(tmp_path / "absent") is None
    assert read_manifest(tmp_path, "t") is None
    (tmp_path / ".t.partial-0123abcd").mkdir()  # all that a first save, killed, leaves
    assert read_manifest(tmp_path) is None
    with pytest.raises(CheckpointError, match="missing or empty: there is no checkpoint"):
        world.load(tmp_path, None, [[], []])


def test_folders_without_what_was_asked_for_list_what_is_there(world, tmp_path, put):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"has no 'latest' file\. No checkpoint is there, only: notes\.txt"):
        read_manifest(tmp_path)
    for tag in ("step9", "step10"):
        put(tag)
    with pytest.raises(CheckpointError, match=r"lacks 'step7', the tag asked for\. Tags there: step9, step10\."):
        read_manifest(tmp_path, "step7")
    (tmp_path / "latest").write_text("gone\n")
    with pytest.raises(
        CheckpointError, match=r"lacks 'gone', the tag that 'latest' names\. Tags there: step9, step10\."
    ):
        world.load(tmp_path, None, [[], []])
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="which is no tag"):
        read_manifest(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"no 'latest' file\. Tags there: step9, step10\. Pass one"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"It is itself a checkpoint: pass directory="):
        read_manifest(tmp_path / "step9")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json.*mp_rank_00_model_states\.pt"):
        read_manifest(tmp_path, "weights")
    with pytest.raises(CheckpointError, match="but a file"):
        read_manifest(tmp_path / "notes.txt")


def test_leftovers_are_cleared_by_the_next_save(tmp_path, put, world):
    put("a", 1)
    for name in (".b.partial-0123abcd", ".a.replaced-0123abcd", ".c.pruned-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_bytes(b"x")
    (tmp_path / ".latest.partial-0123abcd").write_text("b")
    (tmp_path / ".mine").mkdir()
    put("d", 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".mine", "a", "d", "latest"]
    assert number_in(world, tmp_path, "a") == 1


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path, put, world):
    put("t", 1)
    (tmp_path / "t").rename(tmp_path / ".t.replaced-0123abcd")
    assert list_tags(tmp_path) == ["t"]
    assert number_in(world, tmp_path) == 1
    put("u", 2, save_latest=False)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "t", "u"]
    assert number_in(world, tmp_path) == 1


def test_the_old_checkpoint_comes_back_where_the_new_one_cannot_be_moved_in(tmp_path, put, world, monkeypatch):
    put("t", 1)
    import os

    real = os.rename

    def rename(source, target):
        if ".partial-" in str(source):
            raise OSError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr("engine.checkpoint.folder.os.rename", rename)
    with pytest.raises(CheckpointError, match=r"Saving checkpoint 't' .*Permission denied"):
        put("t", 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "t"]
    assert number_in(world, tmp_path) == 1


def test_latest_moves_last(tmp_path, put, world, monkeypatch):
    put("a", 1)

    def fail(directory, tag):
        assert number_in(world, tmp_path, tag) == 2  # whole before `latest` names it
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.checkpoint.folder.write_latest", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        put("b", 2)
    assert number_in(world, tmp_path) == 1


def test_a_directory_that_is_a_file(tmp_path, world):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"Saving checkpoint 't' into .*file failed: NotADirectoryError"):
        world.save(tmp_path / "file", "t", [[], []])


def test_prune_keeps_what_any_rule_wants(tmp_path, put):
    losses = {2: 0.5, 10: 3.0, 4: 1.0, 20: 4.0, 7: 2.0, 9: None}
    for number, loss in losses.items():
        put(default_tag(number), number, save_latest=number == 4, metric=loss)
    broken = put(default_tag(1), 1, save_latest=False)
    (broken / "manifest.json").write_text("{")
    put("mine", 1, save_latest=False)
    untouched = ["global_step1", "mine"]

    def left():
        return [tag for tag in list_tags(tmp_path) if tag not in untouched]

    assert prune(tmp_path, Retention()) == []
    assert prune(tmp_path, Retention(keep_last=1, keep_every=10, keep_best=2), keep=[default_tag(7)]) == [
        "global_step9"
    ]
    assert left() == [default_tag(steps) for steps in (2, 4, 7, 10, 20)]
    assert prune(tmp_path, Retention(keep_best=1)) == [default_tag(steps) for steps in (7, 10, 20)]
    assert prune(tmp_path, Retention(keep_last=1)) == [default_tag(2)]
    assert left() == [default_tag(4)]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    assert list_tags(tmp_path) == ["global_step1", "global_step4", "mine"]


def test_a_save_deletes_what_is_not_kept_and_survives_that_it_cannot(tmp_path, put, monkeypatch, caplog):
    for number in range(1, 5):
        put(default_tag(number), number, retention=Retention(keep_last=2))
    assert list_tags(tmp_path) == ["global_step3", "global_step4"]
    monkeypatch.setattr("engine.checkpoint.saving.prune", lambda *args, **options: os.mkdir(tmp_path))
    put(default_tag(5), 5, retention=Retention(keep_last=2))
    assert list_tags(tmp_path) == ["global_step3", "global_step4", "global_step5"]
    assert "were not deleted" in caplog.text


@pytest.mark.parametrize("rule", ["keep_last", "keep_every", "keep_best"])
def test_retention_counts_from_one(rule):
    with pytest.raises(CheckpointError, match=f"{rule}=0"):
        Retention(**{rule: 0})
