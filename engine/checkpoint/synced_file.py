"""A file that is written once, front to back: past the page cache where the file system allows it, hashed on the way.

Written through the page cache, a checkpoint costs a copy by the kernel and pushes out pages that others need; direct
writes (O_DIRECT of https://man7.org/linux/man-pages/man2/open.2.html) are faster and leave the processor to training.
They want whole blocks at aligned addresses, hence the two buffers: one is filled and hashed while the other is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy
import xxhash

BUFFER_BYTES = 8 << 20
BLOCK_BYTES = 4096
"""Direct writes begin and end at multiples of this; no common disk has larger blocks."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class SyncedFile:
    """The new file ``path``. A context manager: on leaving without an exception the bytes are on the disk.

    ``size_bytes``: what it will have in the end, reserved at once, so that a full disk is found before the writing.
    Raises OSError.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._hash = xxhash.xxh3_128()
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(2)]  # anonymous maps are page-aligned
        self._filled = 0
        self._pending: Future[None] | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._is_direct = bool(_DIRECT)
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if not _DIRECT or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # The file system has no direct writes; some have made the file before they say so.
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self._is_direct = False
            self._descriptor = os.open(path, flags, 0o666)
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")

    @property
    def xxh3_128(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> SyncedFile:
        try:
            self._reserve()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._close()

    def write(self, data: memoryview) -> None:
        """Append ``data`` (bytes). It may change after this returns."""
        source = numpy.frombuffer(data, dtype=numpy.uint8)
        while source.size:
            part = source[: BUFFER_BYTES - self._filled]
            target = numpy.frombuffer(self._buffers[0], dtype=numpy.uint8)
            numpy.copyto(target[self._filled : self._filled + part.size], part)
            self._filled += part.size
            source = source[part.size :]
            if self._filled == BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Give the full buffer to the writer once it is done with the other one."""
        full, num_bytes, self._filled = self._buffers[0], self._filled, 0
        self._await()
        padded = num_bytes if not self._is_direct else -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._pending = self._writer.submit(self._write_out, memoryview(full)[:padded])
        # xxhash and the write let go of the interpreter lock, so that this overlaps with them
        self._hash.update(memoryview(full)[:num_bytes])
        self._buffers.reverse()

    def _write_out(self, data: memoryview) -> None:
        while data:
            try:
                num_bytes = os.write(self._descriptor, data)
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._leave_direct()
                continue
            data = data[num_bytes:]
            if self._is_direct and num_bytes % BLOCK_BYTES:
                self._leave_direct()

    def _leave_direct(self) -> None:
        self._is_direct = False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)

    def _await(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _reserve(self) -> None:
        if self._size_bytes and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._descriptor, 0, self._size_bytes)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
                    raise

    def _finish(self) -> None:
        if self._filled:
            self._flush()
        self._await()
        os.ftruncate(self._descriptor, self._size_bytes)  # the last block was padded
        os.fsync(self._descriptor)

    def _close(self) -> None:
        self._writer.shutdown()
        os.close(self._descriptor)
