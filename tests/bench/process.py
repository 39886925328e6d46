"""What the kernel says of a process and of the machine. Linux only, as the figures are."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
REPOSITORY = Path(__file__).resolve().parents[2]


def age_seconds() -> float:
    """Seconds since the kernel started this process: interpreter start and imports are in it."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / TICKS_PER_SECOND


def memory_mib(field: str) -> float:
    """``VmRSS``, the resident memory now, or ``VmHWM``, its peak. Unlike ru_maxrss it begins anew with the program."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise KeyError(field)


def machine_busy_seconds() -> float:
    """CPU seconds that every process of the machine together has used since boot."""
    user, nice, system, _idle, _iowait, interrupts, soft_interrupts, stolen = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + interrupts + soft_interrupts + stolen) / TICKS_PER_SECOND


def children_cpu_seconds() -> float:
    """CPU seconds of the children, and theirs, that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def machine_facts() -> dict[str, Any]:
    """What a reader needs to know to compare figures."""
    import torch

    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "engine", "tests") else ""),
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


def publish(text: str, output: Path | None) -> None:
    """Print a page, and write it where asked."""
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
