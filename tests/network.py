"""Networks of one's own: Linux network namespaces, in which the kernel's counters see nobody else's bytes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 0x1
UNSHARE = ["unshare", "--net"] if os.name == "posix" and os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def why_not_allowed() -> str | None:
    """Why this process cannot make a network namespace; None where it can."""
    try:
        finished = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare (util-linux)"
    return finished.stderr.strip() if finished.returncode else None


def enter_own_network() -> None:
    """Move this process, which must have one thread, into a network of its own with nothing but loopback, switched on.

    Raises OSError where the kernel does not allow it.
    """
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    switch_on("lo")


def switch_on(interface: str) -> None:
    """As `ip link set INTERFACE up`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", interface.encode(), 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(control, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", interface.encode(), flags | IFF_UP))


def sent_bytes(interface: str) -> int:
    """What the kernel has sent on an interface of this process's network, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise KeyError(interface)
