"""Hosts on one machine: network namespaces, joined by a bridge, each with a link of a given rate in both directions.

Everything lives in a namespace of its own, which the caller has entered (`facts_inside`), and namespaces live as long
as a process in them. The processes here die with their parent, so nothing stays behind, however the parent ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.process import machine_facts
from tests.network import UNSHARE, why_not_allowed

INSIDE = "BENCH_INSIDE_OWN_NETWORK"
TOOLS = ("ip", "tc", "nsenter", "setpriv", "unshare")
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
PROBE_BYTES = 4_000_000
PROBE_PORT = 29400
EXACT_MBIT_PER_SECOND = 200


def why_not_possible() -> str | None:
    """Why there can be no hosts on this machine; None where there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a feature of Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: apt-get install iproute2 util-linux)"
    if reason := why_not_allowed():
        return f"network namespaces are not allowed here ({reason})"
    return None


def facts_inside(module: str, argv: Sequence[str] | None) -> dict[str, Any] | None:
    """Start ``python -m module`` anew in a network of its own, and return there what a page says of the machine. None,
    and it is printed why, where there can be no hosts."""
    if reason := why_not_possible():
        print(f"skipped: {reason}")
        return None
    if not os.environ.get(INSIDE):
        os.environ[INSIDE] = "1"
        arguments = sys.argv[1:] if argv is None else argv
        os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, "-m", module, *arguments])
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {**machine_facts(), "tcp": congestion, "load": f"{os.getloadavg()[0]:.1f}"}


class Hosts:
    """``size`` hosts 10.77.0.1, 10.77.0.2, ... on one bridge."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holders: list[subprocess.Popen[bytes]] = []
        run("ip", "link", "add", "bridge", "type", "bridge")
        run("ip", "link", "set", "bridge", "up")
        for index in range(size):
            self._add(index)

    def _add(self, index: int) -> None:
        holder = subprocess.Popen([*DIE_WITH_PARENT, "unshare", "--net", "sleep", "infinity"])
        self._holders.append(holder)
        ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{holder.pid}/ns/net")
        while theirs.readlink() == ours.readlink():
            time.sleep(0.01)
        link = f"link{index}"
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        run("ip", "link", "set", link, "master", "bridge", "up")
        self.on(index, "ip", "address", "add", f"{address(index)}/24", "dev", "eth0")
        self.on(index, "ip", "link", "set", "eth0", "up")
        self.on(index, "ip", "link", "set", "lo", "up")

    def on(self, index: int, *command: str) -> None:
        run("nsenter", "--net", "--target", str(self._holders[index].pid), *command)

    def set_rate(self, mbit_per_second: int) -> None:
        """Every host sends and receives at most this much, headers included. The bucket holds half a millisecond."""
        burst_bytes = max(4 * 1514, 125 * mbit_per_second // 2)
        limit = ["rate", f"{mbit_per_second}mbit", "burst", str(burst_bytes), "latency", "50ms"]
        # Up to here packets are as they would be on the wire, and the interface's counter sees every header. Above,
        # cutting them costs this machine's cores too much; tbf still counts headers, the interface's counter does not.
        segments = "1" if mbit_per_second <= EXACT_MBIT_PER_SECOND else "44"
        for index in range(self.size):
            run("ip", "link", "set", f"link{index}", "gso_max_segs", segments)
            self.on(index, "ip", "link", "set", "eth0", "gso_max_segs", segments)
            run("tc", "qdisc", "replace", "dev", f"link{index}", "root", "tbf", *limit)
            self.on(index, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)

    def measured_rate(self) -> float:
        """Mbit/s of payload that one TCP connection carries from the second host to the first."""
        with self.start(0, [sys.executable, "-m", "tests.bench.hosts", "receive"], {}) as receiver:
            receiver.stdout.readline()  # type: ignore[union-attr]  # it listens
            with self.start(1, [sys.executable, "-m", "tests.bench.hosts", "send", address(0)], {}):
                seconds = float(receiver.stdout.readline())  # type: ignore[union-attr]
        return PROBE_BYTES * 8 / 1e6 / seconds

    def start(self, index: int, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process on a host, which ends with this one."""
        where = ["nsenter", "--net", "--target", str(self._holders[index].pid)]
        return subprocess.Popen(
            [*where, *DIE_WITH_PARENT, *command],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
        run("ip", "link", "delete", "bridge")


@contextlib.contextmanager
def hosts(size: int) -> Iterator[Hosts]:
    network = Hosts(size)
    try:
        yield network
    finally:
        network.close()


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def run(*command: str) -> None:
    """Raises RuntimeError with what the command said."""
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}: {finished.stderr.strip() or finished.stdout.strip()}")


def receive() -> None:
    with socket.create_server(("", PROBE_PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            connection.recv(1, socket.MSG_WAITALL)
            started, left = time.perf_counter(), PROBE_BYTES
            while left > 0 and (data := connection.recv(1 << 16)):
                left -= len(data)
            print(time.perf_counter() - started, flush=True)


def send(to: str) -> None:
    with socket.create_connection((to, PROBE_PORT), timeout=10) as connection:
        connection.sendall(bytes(PROBE_BYTES + 1))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2])
