"""Every way to damage or forge a checkpoint is refused by name, on all ranks alike, before a tensor is touched."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch

from engine.checkpoint import CheckpointError, load_client_state, load_tensors, read_manifest, verify_files
from engine.checkpoint.manifest import content_hash


@pytest.fixture
def value():
    return torch.arange(60.0).reshape(10, 6)


@pytest.fixture
def saved(world, tmp_path, value):
    halves = [[world.part("parameters.w", value, ((row, 0), (5, 6)))] for row in (0, 5)]
    return world.save(tmp_path / "run", "t", halves, client_state={"t": torch.ones(2)})


@pytest.fixture
def refused(world, saved):
    """Load on two ranks and expect a refusal that matches; the tensor stays untouched."""

    def check(pattern, **options):
        target = torch.full((10, 6), -1.0)
        chunks = [[world.part("parameters.w", target, ((row, 0), (5, 6)))] for row in (0, 5)]
        with pytest.raises(CheckpointError, match=pattern):
            world.load(saved.parent, "t", chunks, **options)
        assert target.eq(-1).all()

    return check


def test_a_flipped_bit(saved, refused, world, value):
    path = saved / "rank_00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0x10
    path.write_bytes(raw)
    refused(r"rank_00001\.safetensors changed after being written")
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors changed"):
        verify_files(read_manifest(saved.parent, "t"))
    target = torch.zeros(10, 6)
    load_tensors(saved.parent, "t", [world.whole("parameters.w", target)], verify=False)
    assert torch.equal(target, value) is False


def test_a_truncated_file(saved, refused):
    os.truncate(saved / "rank_00000.safetensors", 100)
    refused(r"rank_00000\.safetensors has 100 bytes where \d+ were written", verify=False)


def test_a_missing_file(saved, refused):
    (saved / "rank_00001.safetensors").unlink()
    refused(r"rank_00001\.safetensors is missing", verify=False)


def test_a_foreign_file(saved, refused):
    shutil.copy(saved / "rank_00000.safetensors", saved / "rank_00002.safetensors")
    refused(r"rank_00002\.safetensors does not belong to it")


def test_files_swapped_between_ranks(saved, refused):
    first, second = saved / "rank_00000.safetensors", saved / "rank_00001.safetensors"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes().ljust(len(content), b"\0"))
    os.truncate(first, len(content))
    refused(r"rank_00000\.safetensors changed")
    refused("belongs to another checkpoint|impossible header", verify=False)


def test_a_pickle_in_place_of_a_tensor_file_is_never_unpickled(saved, refused, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    path = saved / "rank_00000.safetensors"
    size = path.stat().st_size
    path.write_bytes(pickle.dumps(Hostile()).ljust(size, b"."))
    os.truncate(path, size)
    refused("not a safetensors file", verify=False)
    (saved / "manifest.json").write_bytes(pickle.dumps(Hostile()))
    refused(r"manifest\.json is damaged")
    assert not (tmp_path / "owned").exists()


def test_a_manifest_edited_by_hand_is_noticed(saved, refused):
    path = saved / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"global_steps": 0', '"global_steps": 7'))
    refused(r"manifest\.json was changed after it was written")
    assert read_manifest(saved.parent, "t", verify=False).counters == {"global_steps": 7}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "other"}', "[" * 100_000, '{"a": 1, "a": 2}'])
def test_what_is_no_manifest(saved, refused, content):
    (saved / "manifest.json").write_text(content)
    refused(r"manifest\.json is (damaged|not a checkpoint's manifest)")


FILE = "rank_00000.safetensors"


@pytest.mark.parametrize(
    ("path", "forged", "message"),
    [
        (
            ["files", "../../etc/passwd"],
            {"size_bytes": 1, "xxh3_128": "0" * 32},
            "a name in files is '../../etc/passwd'",
        ),
        (["files", "/etc/passwd"], {"size_bytes": 1, "xxh3_128": "0" * 32}, "a name in files"),
        (["files", FILE, "size_bytes"], -1, r"size_bytes is -1"),
        (["files", FILE, "size_bytes"], True, r"size_bytes is True"),
        (["files", FILE, "xxh3_128"], "0", r"xxh3_128 is '0'"),
        (["files"], [], r"files is \[\]"),
        (["tensors", "parameters.w", "pieces", 0, 0], "../x", r"pieces\[0\] is '\.\./x'"),
        (["tensors", "parameters.w", "pieces", 0, 2], [-5, 0], "an integer from 0 up"),
        (["tensors", "parameters.w", "pieces", 0, 3], [50, 6], "a non-empty box inside"),
        (["tensors", "parameters.w", "pieces", 0, 3], [5], "a non-empty box inside"),
        (["tensors", "parameters.w", "pieces", 0, 3], [4, 6], "6 of its 60 elements are given by no rank"),
        (["tensors", "parameters.w", "pieces", 0, 3], [6, 6], r"elements \[5:6,0:6\] are given twice"),
        (["tensors", "parameters.w", "pieces", 0], ["x"], r"pieces\[0\] is \['x'\]"),
        (["tensors", "parameters.w", "shape"], [1 << 40, 1 << 40], "at most"),
        (["tensors", "parameters.w", "shape"], "60", "shape is '60'"),
        (["tensors", "parameters.w", "dtype"], "object", "dtype is 'object'"),
        (["tensors", "parameters.w"], None, "parameters.w is None"),
        (
            ["tensors", "parameters.huge"],
            {"shape": [1 << 40], "dtype": "F32", "pieces": [[FILE, "k", [0], [1 << 40]]]},
            "no more bytes than rank_00000.safetensors has",
        ),
        (["layout"], None, "layout is None"),
        (["layout", "mesh"], {"dp": "2"}, "layout.mesh.dp is '2'"),
        (["layout", "placement"], "DDT", "the letters P, D, T in any order"),
        (["states"], {"x": {"on_layout_change": "run", "values": [1]}}, "allowed: reshard, same_layout_only, drop"),
        (["states"], {"x": {"on_layout_change": "drop", "values": [1, 2, 3]}}, "1 value or 2"),
        (["counters"], {"__tuple__": [1]}, "counters is"),
        (["config"], {"a": {"__items__": 1}}, r"config\.a: malformed __items__"),
        (["aliases"], {"a": 1}, "aliases.a is 1"),
        (["metric"], "2", "metric is '2'; allowed: a number or null"),
        (["tag"], "../t", "Checkpoint tag '../t' cannot be used"),
        (["tag"], "other", "holds the checkpoint 'other': it was renamed"),
        (["format_version"], 2, "format version 2; this engine reads up to 1"),
        (["format_version"], None, "format_version is None"),
    ],
)
def test_forged_manifests_with_a_right_hash(saved, refused, path, forged, message):
    content = json.loads((saved / "manifest.json").read_text())
    target = content
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = forged
    content["sha256"] = content_hash(content)
    (saved / "manifest.json").write_text(json.dumps(content))
    refused(message, verify=False)


def test_client_state_cannot_name_a_tensor_that_is_not_its_own(saved):
    content = json.loads((saved / "manifest.json").read_text())
    for name in ("parameters.w", "client_state.9"):
        content["client_state"] = {"t": {"__tensor__": name}}
        content["sha256"] = content_hash(content)
        (saved / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=f"names the tensor '{name}'"):
            load_client_state(read_manifest(saved.parent, "t"))
