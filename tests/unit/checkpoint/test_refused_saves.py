"""Saves that must not happen: refused with the same words on every rank, and nothing changes on disk."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint import CheckpointError, load_tensors, saving
from engine.contracts import Chunk


def halves(world, value):
    """Two ranks, half of a 6-element tensor each."""
    tensor = torch.full((6,), float(value))
    return [[world.part("parameters.x", tensor, ((start,), (3,)))] for start in (0, 3)]


def value_in(world, directory):
    target = torch.full((6,), -1.0)
    load_tensors(directory, None, [world.whole("parameters.x", target)])
    assert target.eq(target[0]).all()
    return target[0].item()


def test_a_save_that_does_not_cover_a_tensor_is_refused(world, tmp_path):
    value = torch.arange(6.0)
    first, second = (world.part("parameters.x", value, ((start,), (3,))) for start in (0, 3))
    overlap = world.part("parameters.x", value, ((2,), (4,)))
    with pytest.raises(CheckpointError, match=r"parameters\.x: 3 of its 6 elements are given by no rank"):
        world.save(tmp_path, "t", [[first], []])
    with pytest.raises(CheckpointError, match=r"parameters\.x: elements \[2:3\] are given twice"):
        world.save(tmp_path, "t", [[first], [overlap]])
    with pytest.raises(CheckpointError, match=r"rank 1: parameters\.x: elements \[3:6\] are given twice by rank 1"):
        world.save(tmp_path, "t", [[first], [second, second]])
    with pytest.raises(CheckpointError, match=r"parameters\.x is F64 \[6\] in one chunk and F32 \[6\] in another"):
        world.save(tmp_path, "t", [[first], [world.part("parameters.x", value.double(), ((3,), (3,)))]])
    with pytest.raises(CheckpointError, match=r"rank 0: parameters\.x: a tensor of shape \(3,\) for the box"):
        world.save(tmp_path, "t", [[Chunk("parameters.x", (6,), (4,), (3,), value[:3])], []])
    with pytest.raises(CheckpointError, match="on meta cannot be saved"):
        world.save(tmp_path, "t", [[world.whole("parameters.x", torch.empty(6, device="meta"))], []])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_on_one_rank_is_told_alike_on_all_and_changes_nothing(world, tmp_path, monkeypatch):
    world.save(tmp_path, "old", halves(world, 0))
    real = saving.write_tensor_file

    def full_disk(path, tensors):
        if path.name == "rank_00001.safetensors":
            raise OSError(28, "No space left on device")
        return real(path, tensors)

    monkeypatch.setattr("engine.checkpoint.saving.write_tensor_file", full_disk)
    with pytest.raises(CheckpointError, match=r"'new'.*failed: rank 1: OSError: \[Errno 28\] No space left"):
        world.save(tmp_path, "new", halves(world, 1))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "old"]
    assert value_in(world, tmp_path) == 0


def test_a_rank_that_writes_to_a_disk_of_its_own_is_noticed(world, tmp_path, monkeypatch):
    real = saving.write_tensor_file

    def elsewhere(path, tensors):
        if path.name == "rank_00001.safetensors":
            path = tmp_path / path.name
        return real(path, tensors)

    monkeypatch.setattr("engine.checkpoint.saving.write_tensor_file", elsewhere)
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors is missing"):
        world.save(tmp_path / "run", "t", halves(world, 0))
    assert list((tmp_path / "run").iterdir()) == []


def test_ranks_that_are_not_at_the_same_step_are_refused(world, tmp_path):
    with pytest.raises(CheckpointError, match=r'rank 1 has counters {"global_steps": 1} where rank 0 has'):
        world.save(tmp_path, "t", halves(world, 0), counters=lambda rank: {"global_steps": rank})
    with pytest.raises(CheckpointError, match=r"rank 0: config\.run: a builtins\.object"):
        world.save(tmp_path, "t", halves(world, 0), config={"run": object()})


def test_tag_validation(world, tmp_path, caplog):
    def tags(rank):
        return f"step{rank}"

    chunks = halves(world, 0)
    with pytest.raises(CheckpointError, match="different tags: 'step0' on rank 0, 'step1' on rank 1"):
        world.save(tmp_path, tags, chunks, tag_validation="Fail")
    assert world.save(tmp_path, tags, chunks, tag_validation="Ignore").name == "step0"
    assert caplog.records == []
    assert world.save(tmp_path, tags, chunks, tag_validation="Warn").name == "step0"
    assert ["'step1' on rank 1" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(CheckpointError, match="tag_validation is 'warn'; allowed: Ignore, Warn, Fail"):
        world.save(tmp_path, "t", chunks, tag_validation="warn")
    with pytest.raises(CheckpointError, match=r"Checkpoint tag '\.\./up' cannot be used"):
        world.save(tmp_path, "../up", chunks)
