"""What is written is what was given, with direct writes and without, and a full disk is an error, not a short file."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import xxhash

from engine.checkpoint import synced_file
from engine.checkpoint.synced_file import SyncedFile
from engine.checkpoint.tensor_file import hash_of

BUFFER = 16384


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(synced_file, "BUFFER_BYTES", BUFFER)


def refuse_to_open(monkeypatch):
    real = os.open

    def open_plain(path, flags, *rest):
        if flags & synced_file._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(synced_file.os, "open", open_plain)


def refuse_to_write(monkeypatch):
    """A file system that opens for direct writes and then does not take them."""
    import fcntl

    real = os.write

    def write_plain(descriptor, data):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & synced_file._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data)

    monkeypatch.setattr(synced_file.os, "write", write_plain)


def write_little(monkeypatch):
    """Short writes, which leave direct ones at an odd place."""
    real = os.write
    monkeypatch.setattr(synced_file.os, "write", lambda descriptor, data: real(descriptor, data[:5000]))


@pytest.mark.parametrize("system", [None, refuse_to_open, refuse_to_write, write_little])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 5 * BUFFER, 5 * BUFFER + 4097])
@pytest.mark.parametrize("step", [1000, BUFFER, 3 * BUFFER + 5])
def test_the_file_holds_the_bytes_and_the_hash_is_theirs(tmp_path, monkeypatch, size, step, system):
    if system is not None:
        system(monkeypatch)
    data = os.urandom(size)
    with SyncedFile(tmp_path / "f", size) as file:
        for start in range(0, size, step):
            piece = bytearray(data[start : start + step])
            file.write(memoryview(piece))
            piece[:] = bytes(len(piece))  # the caller's memory is its own again
    assert (tmp_path / "f").read_bytes() == data
    assert file.xxh3_128 == xxhash.xxh3_128(data).hexdigest() == hash_of(tmp_path / "f")


def test_a_file_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        SyncedFile(tmp_path / "f", 4)
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.parametrize("reserves", [True, False])
def test_no_room(tmp_path, monkeypatch, reserves):
    if not reserves:
        monkeypatch.setattr(SyncedFile, "_reserve", lambda file: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BUFFER, limits[1]))
    num_descriptors = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(OSError, match="File too large"), SyncedFile(tmp_path / "f", 8 * BUFFER) as file:
            file.write(memoryview(bytes(8 * BUFFER)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
