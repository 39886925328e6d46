"""kill -9 in the middle of a save: the previous checkpoint loads, `latest` is right, the next save cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from engine.checkpoint import load_tensors, read_manifest

# Saves `old` (zeros), then saves again (ones) with one step of the save slowed down to forever.
SCRIPT = """
import sys, time
import torch
from engine.checkpoint import folder, save, tensor_file
from engine.contracts import Chunk, SavedLayout

directory, tag, stall_at = sys.argv[1:]
layout = SavedLayout(world_size=1, zero_stage=0, mesh={}, global_batch_size=1)

def write(tag, value):
    tensor = torch.full((3_000_000,), value)
    chunk = Chunk("parameters.x", (3_000_000,), (0,), (3_000_000,), tensor)
    save(directory, tag, chunks=[chunk], states={}, layout=layout, client_state={}, config={},
         counters={"global_steps": 0}, aliases={}, rank=0, world_size=1)

def stall(*arguments):
    print("stalled", flush=True)
    time.sleep(60)

def slow(descriptor, block, real=tensor_file._write_all):
    real(descriptor, block[: len(block) // 2])
    stall()

write("old", 0.0)
if stall_at == "tensors":
    tensor_file._write_all = slow
else:
    folder.delete = stall  # the replaced checkpoint is aside, the new one in place
write(tag, 1.0)
"""


def kill_during_save(directory, tag, stall_at):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(directory), tag, stall_at],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stalled\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize(
    ("tag", "stall_at", "expected"), [("new", "tensors", 0.0), ("old", "tensors", 0.0), ("old", "delete", 1.0)]
)
def test_a_killed_save_leaves_a_whole_checkpoint(world, tmp_path, tag, stall_at, expected):
    kill_during_save(tmp_path, tag, stall_at)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    assert read_manifest(tmp_path).tag == "old"
    target = torch.full((3_000_000,), -1.0)
    load_tensors(tmp_path, None, [world.whole("parameters.x", target)])
    assert target.eq(expected).all()
    world.save(tmp_path, "next", [[world.whole("parameters.x", torch.ones(1))]])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "next", "old"]
