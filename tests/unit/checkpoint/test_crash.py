"""kill -9 in the middle of a save: a whole checkpoint loads, `latest` names one, the next save cleans up.

The saves run in forked children that touch no torch kernel, only the memory of tensors made before the fork.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from engine.checkpoint import folder, list_tags, load_tensors, read_manifest, synced_file

SIZE = 300_000


@pytest.fixture
def killed(world, tmp_path):
    """Run ``body(report)`` in a child and kill it ``delay`` seconds after it called ``report``."""

    def run(body, delay=0.0):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                body(lambda: os.write(writing, b"!"))
            finally:
                os._exit(3)  # not reached by a child that is killed in time
        os.close(writing)
        try:
            assert os.read(reading, 1) == b"!"
            time.sleep(delay)
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(reading)
        assert os.WTERMSIG(status) == signal.SIGKILL

    return run


def value_in(world, directory, tag=None):
    """The one value that a checkpoint's tensor is filled with; fails where it is a mixture."""
    target = torch.full((SIZE,), -1.0)
    load_tensors(directory, tag, [world.whole("parameters.x", target)])
    assert target.eq(target[0]).all()
    return target[0].item()


def stall_at(moment, report):
    """Make the save of this process stop for good at ``moment``."""

    def stall(*arguments):
        report()
        time.sleep(60)

    if moment == "tensors half written":
        write = synced_file.SyncedFile._write_out

        def half(file, block):
            write(file, block[: len(block) // 2 // 4096 * 4096])
            stall()

        synced_file.SyncedFile._write_out = half
    elif moment == "before the manifest":
        folder.write_synced = stall
    elif moment == "between the renames":
        rename = os.rename
        folder.os.rename = lambda source, target: stall() if ".partial-" in str(source) else rename(source, target)
    elif moment == "before latest":
        folder.write_latest = stall
    elif moment == "before deleting the old":
        folder.delete = stall


@pytest.mark.parametrize(
    ("tag", "moment", "expected"),
    [
        ("new", "tensors half written", 0.0),
        ("new", "before the manifest", 0.0),
        ("new", "before latest", 0.0),
        ("old", "tensors half written", 0.0),
        ("old", "between the renames", 0.0),
        ("old", "before deleting the old", 1.0),
    ],
)
def test_a_save_killed_at(world, tmp_path, killed, tag, moment, expected):
    before, after = torch.zeros(SIZE), torch.ones(SIZE)
    world.save(tmp_path, "old", [[world.whole("parameters.x", before)]])

    def body(report):
        stall_at(moment, report)
        world.save(tmp_path, tag, [[world.whole("parameters.x", after)]])

    killed(body)
    whole_tags = ["new", "old"] if moment == "before latest" else ["old"]
    assert list_tags(tmp_path) == whole_tags
    assert read_manifest(tmp_path).tag == "old"
    assert value_in(world, tmp_path) == expected
    world.save(tmp_path, "next", [[world.whole("parameters.x", after)]])
    assert sorted(os.listdir(tmp_path)) == sorted(["latest", "next", *whole_tags])
    assert value_in(world, tmp_path, "old") == expected


@pytest.mark.parametrize("seed", range(5))
def test_saves_killed_at_random_moments(world, tmp_path, killed, seed):
    delay = torch.rand((), generator=torch.Generator().manual_seed(seed)).item() * 0.05
    values = [torch.full((SIZE,), float(number)) for number in range(4)]

    def body(report):
        for number in range(1_000_000):
            world.save(tmp_path, f"tag{number % 3}", [[world.whole("parameters.x", values[number % 4])]])
            if number == 2:
                report()

    killed(body, delay)
    tags = list_tags(tmp_path)
    assert tags == ["tag0", "tag1", "tag2"]
    assert read_manifest(tmp_path).tag in tags
    assert {value_in(world, tmp_path, tag) for tag in [*tags, None]} <= {0.0, 1.0, 2.0, 3.0}
