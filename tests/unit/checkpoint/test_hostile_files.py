"""A checkpoint that somebody forged can be refused, or load as what it says; it can do nothing else.

Hashes are against accidents, so every forgery here carries the right ones, or verification is off.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.checkpoint import CheckpointError, load_client_state, load_tensors, read_manifest
from engine.checkpoint.manifest import content_hash
from engine.contracts import EngineError

NUM_MUTATIONS = 300
FILE = "rank_00000.safetensors"
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**62, 2**63, 2**70, 10**300, 0.5, -1e308, "", "../../etc/passwd",
    "/etc/passwd", "\0", "rank_00001.safetensors", "F32", "x" * 10_000, [], [[]], [0], [-1], [2**40, 2**40], {},
    {"": {}}, {"__tensor__": "parameters.w"}, {"__tensor__": 3}, {"__float__": "x"}, {"__tuple__": 1},
    {"__items__": [[[], 1]]}, {"__items__": [[{"__tuple__": [[1]]}, 1]]}, {"$tensor": ["float32", "x"]},
    {"$tensor": 1}, {"$dict": [[1]]},
    {"$float": "nan"}, {"$counter": [["a", {}]]}, "gASVHwAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAR0cnVllIWUUpQu",
]  # fmt: skip


class Hostile:
    """Pickled, it makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / "owned"),)


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch):
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("something was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def value():
    return torch.arange(60.0).reshape(10, 6)


@pytest.fixture
def saved(world, tmp_path, value):
    chunks = [[world.whole("parameters.w", value), world.whole("optimizer.w.step", torch.tensor(3.0))]]
    return world.save(tmp_path / "run", "t", chunks, client_state={"t": torch.ones(2), "nested": [{"u": (1, 2.5)}]})


def load(world, saved, **options):
    target = torch.full((10, 6), -1.0)
    load_tensors(saved.parent, None, [world.whole("parameters.w", target)], **options)
    load_client_state(read_manifest(saved.parent, verify=options.get("verify", True)))
    return target


def forge(saved: Path, content: dict[str, Any]) -> None:
    content["sha256"] = content_hash(content)
    (saved / "manifest.json").write_text(json.dumps(content))


def mutate(tree: Any, dice: random.Random) -> None:
    """Replace, delete or double one thing, anywhere in ``tree``."""
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = dice.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and dice.random() < 0.8:
            node = node[key]
            continue
        act = dice.random()
        if act < 0.7:
            node[key] = copy.deepcopy(dice.choice(NASTY))
        elif act < 0.85:
            del node[key]
        elif isinstance(node, dict):
            node[str(dice.choice(["x", "../x", "__tensor__", FILE]))] = node[key]
        else:
            node.append(node[key])
        return


def test_forged_manifests(world, saved, value):
    whole = json.loads((saved / "manifest.json").read_text())
    num_refused = 0
    for seed in range(NUM_MUTATIONS):
        content = copy.deepcopy(whole)
        dice = random.Random(seed)
        for _ in range(dice.choice([1, 1, 2, 5])):
            mutate(content, dice)
        forge(saved, content)
        try:
            found = load(world, saved, verify=seed % 2 == 0)
        except CheckpointError:
            num_refused += 1
            continue
        assert torch.equal(found, value), seed
    assert NUM_MUTATIONS / 4 < num_refused < NUM_MUTATIONS
    assert sorted(os.listdir(saved.parent)) == ["latest", "t"]


def test_bytes_changed_anywhere_in_the_tensor_file(world, saved):
    path = saved / FILE
    whole = path.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", whole[:8])[0]
    for seed in range(NUM_MUTATIONS):
        dice, raw = random.Random(seed), bytearray(whole)
        for _ in range(dice.choice([1, 2, 8])):
            raw[dice.randrange(header_bytes)] = dice.randrange(256)
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match="changed after being written"):
            load(world, saved)
        with contextlib.suppress(CheckpointError):
            load(world, saved, verify=False)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b'{"parameters.w": {"dtype": "F32", "shape": [10, 6], "data_offsets": [0, 1000000]}}',
        b'{"parameters.w": {"dtype": "F32", "shape": [10, 6], "data_offsets": [-240, 0]}}',
        b'{"parameters.w": {"dtype": "F32", "shape": [10, 6], "data_offsets": [240, 0]}}',
        b'{"parameters.w": {"dtype": "F32", "shape": [-10, -6], "data_offsets": [0, 240]}}',
        b'{"parameters.w": {"dtype": "F32", "shape": [1099511627776, 1099511627776], "data_offsets": [0, 240]}}',
        b'{"parameters.w": {"dtype": "O", "shape": [10, 6], "data_offsets": [0, 240]}}',
        b'{"parameters.w": {"dtype": "F32", "shape": [10.0, 6], "data_offsets": [0, 240]}}',
        b'{"parameters.w": 1e999}',
    ],
)
@pytest.mark.parametrize("claimed", [None, 1, 2**40, 2**63, 2**64 - 1])
def test_headers(world, saved, header, claimed):
    length = len(header) if claimed is None else claimed
    raw = struct.pack("<Q", length) + header
    size = max(len(raw), (saved / FILE).stat().st_size)
    (saved / FILE).write_bytes(raw.ljust(size, b" "))
    content = json.loads((saved / "manifest.json").read_text())
    content["files"][FILE]["size_bytes"] = size
    forge(saved, content)
    with pytest.raises(CheckpointError, match=FILE):
        load(world, saved, verify=False)


def as_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def as_pipe(path: Path, elsewhere: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_socket(path: Path, elsewhere: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def as_folder(path: Path, elsewhere: Path) -> None:
    path.unlink()
    path.mkdir()


def as_device(path: Path, elsewhere: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


NO_FILES = [
    (become, name)
    for become in (as_link, as_pipe, as_socket, as_folder, as_device)
    for name in (f"t/{FILE}", "t/manifest.json", "latest")
    if (become, name) != (as_link, "latest")  # below
]


@pytest.mark.parametrize(("become", "name"), NO_FILES)
def test_what_is_no_file_is_not_opened(world, saved, tmp_path, become, name):
    """A pipe would never answer, a device never end."""
    become(saved.parent / name, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=Path(name).name):
        load(world, saved, verify=False)


def test_a_tag_is_checked_wherever_it_was_read(world, saved, tmp_path):
    """Shared folders link `latest`: that is followed, and what stands there is a tag or nothing."""
    elsewhere = tmp_path / "elsewhere"
    as_link(saved.parent / "latest", elsewhere)
    assert load(world, saved, verify=False).shape == (10, 6)
    elsewhere.write_text("../t")
    with pytest.raises(CheckpointError, match="latest"):
        load(world, saved, verify=False)


def test_a_pickle_under_every_name(world, saved, tmp_path, monkeypatch):
    for path in [saved / FILE, saved / "manifest.json", saved.parent / "latest"]:
        path.write_bytes(pickle.dumps(Hostile(tmp_path)))
        with pytest.raises(CheckpointError):
            load(world, saved, verify=False)
    assert not (tmp_path / "owned").exists()


def test_a_file_that_only_claims_its_size(world, saved):
    """Sparse: 4 TB that cost the attacker nothing must not cost the reader its memory."""
    size = 1 << 42
    os.truncate(saved / FILE, size)
    content = json.loads((saved / "manifest.json").read_text())
    content["files"][FILE]["size_bytes"] = size
    name = next(name for name in content["tensors"] if name.startswith("client_state."))
    content["tensors"][name] = {"shape": [1 << 38], "dtype": "F32", "pieces": [[FILE, name, [0], [1 << 38]]]}
    forge(saved, content)
    with pytest.raises(CheckpointError, match=r"client_state\.0"):
        load(world, saved, verify=False)


def test_a_tensor_in_countless_pieces(world, saved):
    content = json.loads((saved / "manifest.json").read_text())
    count = 50_000
    pieces = [[FILE, "parameters.w", [0, column], [1, 1]] for column in range(count)]
    content["tensors"]["parameters.w"] = {"shape": [1, count], "dtype": "U8", "pieces": pieces}
    forge(saved, content)
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"the number of tensors\.parameters\.w\.pieces"):
        load(world, saved, verify=False)
    assert time.monotonic() - started < 20


@pytest.mark.filterwarnings("ignore:data loader")
def test_forged_states_of_the_run(tmp_path):
    """The parts of an engine take over what they can and refuse the rest by name."""
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "fp16": {"enabled": True},
    }
    data = [(torch.ones(3), torch.ones(2)) for _ in range(4)]
    model_engine, *_ = engine.initialize(
        model=nn.Linear(3, 2), config=config, training_data=data, loss_fn=nn.functional.mse_loss
    )
    model_engine.train_batch()
    model_engine.save_checkpoint(tmp_path, tag="t")
    whole = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert {"run", "lr_scheduler", "loss_scaler", "data_loader", "random_states", "optimizer_groups"} <= set(
        whole["states"]
    )
    num_refused = 0
    for seed in range(NUM_MUTATIONS):
        content, dice = copy.deepcopy(whole), random.Random(seed)
        state = content["states"][dice.choice(list(content["states"]))]
        mutate(state if dice.random() < 0.2 else state["values"], dice)
        forge(tmp_path / "t", content)
        try:
            model_engine.load_checkpoint(tmp_path, "t")
        except EngineError:
            num_refused += 1
    assert num_refused > NUM_MUTATIONS / 10
    model_engine.destroy()
